#pragma once

// Everything that knows Python. All functions here need the GIL unless they say otherwise.

#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "communicator.hpp"
#include "engine.hpp"
#include "request.hpp"

namespace aiodist::python {

/// A strong reference.
class Ref {
 public:
    Ref() = default;
    static Ref steal(PyObject* object) noexcept {
        Ref ref;
        ref.object_ = object;
        return ref;
    }
    static Ref share(PyObject* object) noexcept {
        Py_XINCREF(object);
        return steal(object);
    }
    Ref(const Ref& other) noexcept : object_(other.object_) { Py_XINCREF(object_); }
    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref& operator=(Ref other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }
    PyObject* get() const noexcept { return object_; }
    PyObject* leak() noexcept { return std::exchange(object_, nullptr); }
    explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
    PyObject* object_ = nullptr;
};

/// Once the interpreter is going (see shutdown() in module.cpp), a daemon thread stays where it is. Let in, it would be
/// unwound by CPython in the middle of C++ frames, which ends the process.
bool stays_out_at_exit() noexcept;
/// The same for a thread that has the GIL and would run Python's code from C++.
void stay_out_at_exit() noexcept;

/// Where a thread takes the GIL back, or may lose it, below C++ frames: shutdown() waits for it. At exit it is not
/// made.
class ComingIn {
 public:
    ComingIn() noexcept;
    ~ComingIn();
    ComingIn(const ComingIn&) = delete;
    ComingIn& operator=(const ComingIn&) = delete;
};

/// While one lives, other Python threads run.
class WithoutGil {
 public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        const ComingIn coming;
        PyEval_RestoreThread(state_);
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

 private:
    PyThreadState* state_;
};

/// The process's engine, made at the first call; in a forked child a new one.
const std::shared_ptr<Engine>& engine();
/// The engine if there is one of this process, else nullptr.
Engine* engine_if_any() noexcept;

// arrays.cpp: the only file that knows numpy.
struct ArrayView {
    void* data = nullptr;
    std::uint64_t nbytes = 0;
    std::uint32_t itemsize = 0;
    DType dtype = DType::raw;
    bool writeable = false;
    Shape shape;
};
bool import_numpy();
/// Fills `view` if `object` is exactly an ndarray, C-contiguous, aligned and in native byte order; no exception is set
/// otherwise.
bool view_array(PyObject* object, ArrayView& view) noexcept;
/// A new C-contiguous array of `shape` and a native dtype; nullptr with an exception set.
PyObject* new_array(const Shape& shape, DType dtype);
/// An array over `data` that keeps `owner` (whose reference it takes) alive.
PyObject* array_over(void* data, const std::vector<std::uint64_t>& shape, DType dtype, PyObject* owner);
/// A one-dimensional uint8 array likewise.
PyObject* bytes_array(void* data, std::uint64_t nbytes, PyObject* owner);
/// Fills `pieces` with the arrays of a list or tuple, each as for view_array(); false with an exception set otherwise.
/// `itemsize` becomes that of the first array.
bool view_arrays(PyObject* list, bool for_writing, Pieces<std::byte>& pieces, std::uint32_t& itemsize);
/// A list of (first byte, byte behind the last) of each array of a sequence; nullptr with an exception set.
PyObject* bounds_list(PyObject* arrays);
PyObject* shape_tuple(const std::uint64_t* dims, std::size_t ndim);

// failures.cpp
/// Hands over errors.py's and backends' constructors; called once when the Python half is imported.
void set_hooks(PyObject* make_error, PyObject* make_array, PyObject* make_event);
/// The device event behind a future.
PyObject* make_event(PyObject* future);
void raise_failure(const Request& request);
Ref make_exception(const Request& request);
Ref make_received(Request& request);
/// Turns the C++ exception being handled into a Python one.
void translate_exception() noexcept;
/// Runs `body`, turning C++ exceptions into Python ones; then returns `failed`.
template <typename Body, typename Result>
Result guarded(Body body, Result failed) noexcept {
    try {
        return body();
    } catch (...) {
        translate_exception();
        return failed;
    }
}
/// Raises where the engine belongs to another process; false then.
bool check_process(const Engine& owner);

// site.cpp
/// Index of the innermost call site outside this package.
std::uint32_t call_site();
void set_package_folder(const std::string& folder);

// port.cpp
class LoopPort;
/// The running loop's port, or nullptr (with an exception set only if something failed).
LoopPort* running_port();
/// The port whose callbacks run on the notifier thread.
LoopPort* notifier_port();
bool add_port_type(PyObject* module);
void stop_notifier();
/// This thread is needed for shutting down.
void come_in_at_exit() noexcept;

/// What is to happen with the GIL once a request is done.
struct Waiting {
    enum class Kind : std::uint8_t { wake, call, drop };
    Kind kind = Kind::drop;
    Ref target;               // the loop's future; the callback; whatever must live until then
    Ref future;               // the TensorFuture, for callbacks
    bool hears_bell = false;  // counted among the sleepers: the loop itself gets the request done when the bell rings
};

/// Registers, as a sleeper where `waiting` says so; false if the request is done already (then nothing was kept). `id`
/// tells the registration.
bool wait_on(LoopPort* port, Request& request, Waiting waiting, std::uint64_t& id);
void stop_waiting(LoopPort* port, Request& request, std::uint64_t id);
/// Removes the callbacks equal to `callback` of this future; returns how many.
std::size_t remove_callbacks(LoopPort* port, Request& request, PyObject* future, PyObject* callback);
PyObject* new_loop_future(LoopPort* port);
PyObject* port_object(LoopPort* port) noexcept;
struct SpinBudget {
    std::int64_t spent_ns = 0;        // since the loop last turned
    std::int64_t patience_ns = 5000;  // of one await; adapts to success
    const void* mover = nullptr;      // the await that moves its call's data, a piece in each turn of the loop
};
SpinBudget& spin_budget(LoopPort* port) noexcept;

// A loop that awaits a call of up to this many bytes moves it itself, in pieces that are short enough for a loop: to
// wake the engine, and to be woken by it, would take as long as the call. Until it is awaited it is as good as nobody's
// for up to a millisecond, see Engine::wake_soon.
inline constexpr std::uint64_t kLoopNbytes = std::uint64_t{1} << 20;

// future.cpp
bool add_future_type(PyObject* module);
/// Takes the references. `result` is what the future resolves to (an array, or None), or nullptr for what is received;
/// `finish`, if any, is called with it once.
PyObject* new_future(RequestRef request, Ref group, Ref input, Ref result, Ref finish);

// group.cpp
bool add_group_type(PyObject* module);

// collective.cpp
bool add_collective_type(PyObject* module);

}  // namespace aiodist::python
