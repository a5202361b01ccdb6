// The module itself: what forms groups. Hot paths are in group.cpp and future.cpp.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <tuple>

#include "bindings/bindings.hpp"
#include "bindings/process.hpp"
#include "kernels/reduce.hpp"
#include "shm/memory.hpp"

namespace nb = nanobind;

namespace aiodist::python {
namespace {

/// A process whose memory this one reads. Holds it until its groups are closed.
struct ProcessHandle {
    std::shared_ptr<Process> process;
};

// Owned for ever by design: natural destruction at exit would come after the interpreter is gone. shutdown() stops the
// thread.
std::shared_ptr<Engine>* the_engine = nullptr;

std::atomic<bool> exiting{false};
std::atomic<int> coming_in{0};
thread_local bool needed_at_exit = false;

using TuningTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

Tuning tuning_of(const TuningTuple& values) {
    return {std::get<0>(values), std::get<1>(values), std::get<2>(values), std::get<3>(values)};
}

/// Slots that stay within 64 KiB over all members (DESIGN section 4, rule 13). Staging rings of 2 MiB a rank: twice the
/// second-level cache of today's server cores, see Communicator::take_slots. Segments of 64 KiB, smaller where more
/// than eight ranks divide the ring.
TuningTuple default_tuning(std::uint32_t size) {
    constexpr std::uint32_t kSlots = 8, kKiB = 1024, kStaging = 2048 * kKiB, kDepth = 4;
    const std::uint32_t slot = std::min(16 * kKiB, 64 * kKiB / size / 64 * 64);
    std::uint32_t segment = 64 * kKiB;
    while (segment > 4 * kKiB && segment * size * kDepth > kStaging) {
        segment /= 2;
    }
    return {kSlots, std::max<std::uint32_t>(slot, 64), segment, std::max<std::uint32_t>(2, kStaging / segment / size)};
}

std::tuple<int, int, int, int> fds() {
    const ProcessFds all = engine()->fds();
    return {all.arena, all.bell, all.pidfd, all.pid};
}

ProcessHandle attach(int arena, int bell, int pidfd, int pid) {
    Fd first(arena), second(bell), third(pidfd);
    return {engine()->attach(std::move(first), std::move(second), std::move(third), pid)};
}

std::uint64_t reserve(const TuningTuple& tuning, std::uint64_t id, int rank, int size) {
    const auto owner = engine();
    const nb::gil_scoped_release released;  // populates memory
    return Communicator::reserve(*owner, tuning_of(tuning), id, rank, size);
}

/// One-dimensional uint8 memory that peers can read; page-aligned, freed with the last array over it.
nb::object shared_bytes(std::uint64_t nbytes) {
    struct Block {
        std::shared_ptr<Engine> engine;
        std::uint64_t offset;
    };
    const auto owner = engine();
    std::uint64_t offset = 0;
    {
        const nb::gil_scoped_release released;
        offset = owner->arena().allocate(nbytes);
    }
    nb::capsule keeper(new Block{owner, offset}, [](void* at) noexcept {
        auto* const block = static_cast<Block*>(at);
        if (block->engine->pid() == present_pid()) {
            block->engine->arena().release(block->offset);
            delete block;
        }
    });
    return nb::steal(bytes_array(owner->arena().at(offset), nbytes, keeper.release().ptr()));
}

void rest() {
    if (Engine* const present = engine_if_any()) {
        const nb::gil_scoped_release released;
        present->rest();
    }
}

/// Lets those in who did not see that the interpreter is going: later, waiting for the GIL would end them, and with
/// them the process. The caller has let go of the GIL. Bounded: a forked child may count threads that it does not have.
void wait_for_those_coming_in() {
    const TimePoint until = Clock::now() + std::chrono::seconds(1);
    while (coming_in.load(std::memory_order_seq_cst) != 0 && Clock::now() < until) {  // pairs with ComingIn
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

void shutdown() {
    if (Engine* const present = engine_if_any()) {
        come_in_at_exit();
        exiting.store(true, std::memory_order_seq_cst);  // before the calls end that other threads block in
        {
            const nb::gil_scoped_release released;
            present->leave_all();
            wait_for_those_coming_in();
        }
        stop_notifier();
        const nb::gil_scoped_release released;
        present->stop();
    }
}

}  // namespace

void come_in_at_exit() noexcept { needed_at_exit = true; }

bool stays_out_at_exit() noexcept { return exiting.load(std::memory_order_seq_cst) && !needed_at_exit; }

void stay_out_at_exit() noexcept {
    if (stays_out_at_exit()) {
        const WithoutGil released;
    }
}

ComingIn::ComingIn() noexcept {
    coming_in.fetch_add(1, std::memory_order_seq_cst);  // before the load: shutdown() sees us, or we see it
    if (stays_out_at_exit()) {
        coming_in.fetch_sub(1, std::memory_order_seq_cst);
        while (true) {
            ::pause();  // until the process ends
        }
    }
}

ComingIn::~ComingIn() { coming_in.fetch_sub(1, std::memory_order_seq_cst); }

const std::shared_ptr<Engine>& engine() {
    if (the_engine == nullptr || (*the_engine)->pid() != present_pid()) {
        the_engine = new std::shared_ptr<Engine>(Engine::create());  // a forked child leaves the parent's alone
    }
    return *the_engine;
}

Engine* engine_if_any() noexcept {
    return the_engine != nullptr && (*the_engine)->pid() == present_pid() ? the_engine->get() : nullptr;
}

std::shared_ptr<Process> process_of(PyObject* object) {
    ProcessHandle* handle = nullptr;
    return nb::try_cast<ProcessHandle*>(nb::handle(object), handle) && handle != nullptr ? handle->process : nullptr;
}

}  // namespace aiodist::python

// NOLINTNEXTLINE: nanobind's entry point
NB_MODULE(_core, m) {
    using namespace aiodist;
    using namespace aiodist::python;
    // What is kept for ever is kept on purpose: see the_engine, and site.cpp.
    nb::set_leak_warnings(false);
    m.doc() = "The native core of aiodist. Not public: use aiodist.Group and aiodist.TensorFuture.";
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const NoMemory& shortage) {
            PyErr_SetString(PyExc_MemoryError, shortage.what());
        } catch (const std::system_error& failure) {
            PyErr_SetString(PyExc_OSError, failure.what());
        }
    });
    if (!import_numpy() || !add_port_type(m.ptr()) || !add_future_type(m.ptr()) || !add_group_type(m.ptr()) ||
        !add_collective_type(m.ptr())) {
        throw nb::python_error();
    }
    nb::class_<ProcessHandle>(m, "Process", "A process whose memory this one reads.")
        .def_prop_ro("pid", [](const ProcessHandle& self) { return self.process->pid; });
    m.def("default_tuning", &default_tuning, nb::arg("size"),
          "Return (slots, slot_nbytes, segment_nbytes, depth) for a group of `size` ranks.");
    m.def("fds", &fds, "Return this process's (arena, bell, pidfd) descriptors, which stay its own, and its pid.");
    m.def("attach", &attach, nb::arg("arena"), nb::arg("bell"), nb::arg("pidfd"), nb::arg("pid"),
          "Take over a peer's descriptors and map its memory.");
    m.def("this_process", [] { return ProcessHandle{engine()->self()}; }, "Return this process as a member of groups.");
    m.def("reserve", &reserve, nb::arg("tuning"), nb::arg("id"), nb::arg("rank"), nb::arg("size"),
          "Make a member's block for a channel and return its offset, which the peers need.");
    m.def(
        "release", [](std::uint64_t offset) { engine()->arena().release(offset); }, nb::arg("offset"),
        "Free a block that no group was made of.");
    m.def("shared_bytes", &shared_bytes, nb::arg("nbytes"), "Return a uint8 array that peers can read in place.");
    m.def(
        "bounds", [](nb::handle arrays) { return nb::steal(bounds_list(arrays.ptr())); }, nb::arg("arrays"),
        "Return for each array where its memory begins and ends.");
    m.def("rest", &rest, "Stop the engine thread if no group is open; the next one starts it again.");
    m.def("shutdown", &shutdown, "Leave all groups and end all threads, before the interpreter goes.");
    m.def(
        "build_hash", [] { return std::string(AIODIST_BUILD_HASH); },
        "Return the hash of the native source this was built from.");
    m.def(
        "instruction_set", [] { return std::string(kernel_instruction_set()); },
        "Return the name of the kernels' instruction set.");
    m.def(
        "set_hooks",
        [](nb::handle make_error, nb::handle make_array, nb::handle make_event) {
            set_hooks(make_error.ptr(), make_array.ptr(), make_event.ptr());
        },
        nb::arg("make_error"), nb::arg("make_array"), nb::arg("make_event"),
        "Register what builds exceptions, received arrays and events.");
    m.def("set_package_folder", &set_package_folder, nb::arg("folder"),
          "Frames of files under `folder` are no call sites.");
}
