// What Python sees of the device: `tests.cuda_rehearsal.torch_cuda` makes torch's own functions of it.
#include "device.h"

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>
#include <pthread.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace py = pybind11;

namespace rehearsal {

extern std::map<std::string, std::pair<at::ScalarType, std::string>> refused_dtypes;
extern bool has_tf32;
extern bool half_convolutions_are_broken;
extern std::map<std::string, Fault> faults;

namespace {

// Kinds of notes that somebody wants.
std::set<std::string> listened;

// Calls a Python object; after the interpreter's end memory is freed without telling anybody.
struct PythonHost final : Host {
  py::object memory, notes;

  static bool is_over() {
#if PY_VERSION_HEX >= 0x030D0000
    return !Py_IsInitialized() || Py_IsFinalizing();
#else
    return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
  }
  std::string on_malloc(int device, uintptr_t key, size_t bytes, int64_t stream) override {
    const py::gil_scoped_acquire held;
    const py::error_scope kept;
    return memory.attr("malloc")(device, key, bytes, stream).cast<std::string>();
  }
  void on_free(int device, uintptr_t key) override {
    if (is_over()) {
      return;
    }
    const py::gil_scoped_acquire held;
    const py::error_scope kept;
    try {
      memory.attr("free")(device, key);
    } catch (py::error_already_set& error) {  // this is called from destructors
      error.discard_as_unraisable("freeing the pretend device's memory");
    }
  }
  std::string on_workspace(int device, int64_t stream) override {
    const py::gil_scoped_acquire held;
    const py::error_scope kept;
    return memory.attr("open_workspace")(device, stream).cast<std::string>();
  }
  void on_note(const std::string& kind, const std::string& what) override {
    if (is_over() || (kind != "race" && !listened.count(kind))) {
      return;
    }
    const py::gil_scoped_acquire held;
    const py::error_scope kept;
    try {
      notes(kind, what);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("noting what the pretend device does");
    }
  }
  std::array<int64_t, 7> on_statistics(int device) override {
    const py::gil_scoped_acquire held;
    return memory.attr("statistics_of")(device).cast<std::array<int64_t, 7>>();
  }
  void on_reset_peaks(int device) override {
    const py::gil_scoped_acquire held;
    memory.attr("reset_peaks_of")(device);
  }
  void on_empty_cache() override {
    const py::gil_scoped_acquire held;
    memory.attr("empty_caches")();
  }
};

void open(int devices, py::object memory, py::object notes) {
  TORCH_CHECK(devices <= kMostDevices, "at most ", kMostDevices, " devices");
  auto* told = new PythonHost;  // lives as long as the process
  told->memory = std::move(memory);
  told->notes = std::move(notes);
  host = told;
  device_count = devices;
  take_hooks();
  // As torch does: a forked process asks for CUDA anew, and is told that it cannot have it.
  pthread_atfork(nullptr, nullptr, [] { torch::utils::set_requires_device_init(kKind, true); });
}

void refuse_dtype(const std::string& name, const py::object& dtype, const std::string& words) {
  refused_dtypes[name] = {reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type, words};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("open", &open);
  module.def("current_device", &current_device);
  module.def("set_current_device", &set_current_device);
  module.def("touch", &touch);
  module.def("has_context", &has_context);
  module.def("count_of", &count_of);
  module.def("reset_counts", &reset_counts);
  module.def("is_pinned_address", [](uintptr_t address) { return is_pinned(reinterpret_cast<void*>(address)); });
  module.def("refuse_dtype", &refuse_dtype);
  module.def("fail_once", [](const std::string& name, int64_t calls_before, bool out_of_memory, const std::string& words) {
    faults[name] = {calls_before, out_of_memory, words};
  });
  module.def("break_half_convolutions", [](bool broken) { half_convolutions_are_broken = broken; });
  module.def("listen", [](const std::vector<std::string>& kinds) {
    listened = std::set<std::string>(kinds.begin(), kinds.end());
  });
  module.def("init", [] { at::globalContext().lazyInitDevice(kKind); });
  module.def("register_pinned", &register_pinned);
  module.def("unregister_pinned", &unregister_pinned);
  module.def("multiply_in_tf32", [](bool can) { has_tf32 = can; });
  module.def("synchronize", [] { synchronised_device("torch.cuda.synchronize()", current_device()); });
  module.def("host_touches", [](uintptr_t address, size_t bytes, bool writes, const std::string& what) {
    host_touches({address, address + bytes}, writes, what);
  });
  module.def("resize_storage", [](const at::Tensor& tensor, size_t bytes) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto fresh = c10::GetAllocator(kKind)->allocate(bytes);
    const auto kept = std::min(bytes, storage->nbytes());
    if (kept) {
      std::memcpy(fresh.get(), storage->data_ptr().get(), kept);
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  });
  module.def("close_handles", &close_handles);
  module.def("default_generator", [](int device) { return default_generator(device); });
}

}  // namespace rehearsal
