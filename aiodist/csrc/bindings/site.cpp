// Where a call was made, as "file:line". Looked up once per (code object, instruction).

#include <map>
#include <unordered_map>

#include "bindings/bindings.hpp"

namespace aiodist::python {
namespace {

constexpr std::size_t kMostSites = 4096;

struct Known {
    std::unordered_map<int, std::uint32_t> sites;  // by instruction
    bool internal = false;
};

std::string package_folder;
// Keyed by code objects that the map keeps alive, so that no other code object can take their address.
std::unordered_map<PyObject*, Known>& known_codes() {
    static auto* const map =
        new std::unordered_map<PyObject*, Known>;  // kept: Python objects must not be released at static destruction
    return *map;
}
Engine* known_engine = nullptr;
// The latest call site: most programs call from one place many times.
PyObject* latest_code = nullptr;  // kept alive by known_codes()
int latest_instruction = 0;
std::uint32_t latest_site = 0;

Known& known_of(PyObject* code) {
    auto& codes = known_codes();
    const auto found = codes.find(code);
    if (found != codes.end()) {
        return found->second;
    }
    if (codes.size() >= kMostSites) {
        latest_code = nullptr;
        for (auto& [old, known] : codes) {
            Py_DECREF(old);
        }
        codes.clear();
    }
    Known known;
    const char* const file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code)->co_filename);
    known.internal = file != nullptr && !package_folder.empty() && std::string_view(file).starts_with(package_folder);
    PyErr_Clear();
    return codes.emplace(Py_NewRef(code), std::move(known)).first->second;
}

std::uint32_t latest(PyObject* code, int instruction, std::uint32_t site) noexcept {
    latest_code = code;
    latest_instruction = instruction;
    return latest_site = site;
}

}  // namespace

void set_package_folder(const std::string& folder) { package_folder = folder; }

std::uint32_t call_site() {
    Engine* const present = engine().get();
    if (present != known_engine) {  // indices are of one engine's table
        for (auto& [code, known] : known_codes()) {
            known.sites.clear();
        }
        latest_code = nullptr;
        known_engine = present;
    }
    Ref frame = Ref::share(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    while (frame) {
        auto* const at = reinterpret_cast<PyFrameObject*>(frame.get());
        const Ref code = Ref::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
        const int instruction = PyFrame_GetLasti(at);
        if (code.get() == latest_code && instruction == latest_instruction) {
            return latest_site;
        }
        Known& known = known_of(code.get());
        if (!known.internal) {
            const auto found = known.sites.find(instruction);
            if (found != known.sites.end()) {
                return latest(code.get(), instruction, found->second);
            }
            const char* const file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code.get())->co_filename);
            const std::string text =
                std::string(file != nullptr ? file : "?") + ":" + std::to_string(PyFrame_GetLineNumber(at));
            PyErr_Clear();
            return latest(code.get(), instruction, known.sites[instruction] = present->site(text));
        }
        frame = Ref::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
    }
    return 0;
}

}  // namespace aiodist::python
