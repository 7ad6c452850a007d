// What the device (device.cpp) offers to its kernels (kernels.cpp) and to Python (module.cpp).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <string>

// The device's kind: CUDA, or Intel's XPU where this is compiled with -DREHEARSE_XPU.
#ifdef REHEARSE_XPU
#define REHEARSED XPU
#define REHEARSED_NAME "xpu"
#else
#define REHEARSED CUDA
#define REHEARSED_NAME "cuda"
#endif

#include "order.h"

namespace rehearsal {

constexpr int kMostDevices = 16;
constexpr auto kKind = c10::DeviceType::REHEARSED;
constexpr auto kKey = c10::DispatchKey::REHEARSED;

inline bool is_here(const c10::Device& device) {
  return device.type() == kKind;
}
inline bool is_here(const at::Tensor& tensor) {
  return is_here(tensor.device());
}

// What Python decides and learns: the caching allocator's model and the record of synchronisations.
struct Host {
  virtual ~Host() = default;
  // Return why the request fails ("CUDA out of memory. ..."), or nothing.
  virtual std::string on_malloc(int device, uintptr_t key, size_t bytes, int64_t stream) = 0;
  virtual void on_free(int device, uintptr_t key) = 0;
  // A library took its workspace, which stays.
  virtual std::string on_workspace(int device, int64_t stream) = 0;
  // Bytes: allocated, its peak, reserved, its peak, free on the device, of the device; the number of allocations.
  virtual std::array<int64_t, 7> on_statistics(int device) = 0;
  virtual void on_reset_peaks(int device) = 0;
  virtual void on_empty_cache() = 0;
  // What happens here is of interest: "wait", "race", "float64", ... and in words what it is.
  virtual void on_note(const std::string& kind, const std::string& what) = 0;
};

// What an operator says when it fails, after so many calls that do not.
struct Fault {
  int64_t calls_before;
  bool out_of_memory;
  std::string words;
};

extern Host* host;
extern int device_count;

// Answer for CUDA where torch asks; call once.
void take_hooks();

int current_device();
void set_current_device(int index);
int64_t current_stream(int device);
// Raise as CUDA does in a process that was forked after the device was used, and note the context.
void touch(int device);
// Is this a fork of the process that uses the device?
bool is_forked();
// Devices on which this process has a context.
bool has_context(int device);
// The host waits for what this thread's current stream has been given.
void synchronised(const std::string& what, int device);
// The host waits for all streams of a device.
void synchronised_device(const std::string& what, int device);

// Let cuBLAS take a workspace where this thread multiplies matrices on this stream for the first time.
void open_handle(int device);
// Let it take them anew, after Python has given them back.
void close_handles();

// Put memory that a CPU kernel allocated onto the device: it is accounted for there, and freed there.
c10::Storage adopt(const c10::Storage& made_on_cpu, int device, const char* op);

// Is this address in page-locked memory?
bool is_pinned(const void* address);

// Memory of the host that the driver locks in place, and lets go of.
void register_pinned(uintptr_t address, size_t bytes);
void unregister_pinned(uintptr_t address);

// Who uses a block of the device, or page-locked memory; nothing for other memory.
Accesses* accesses_of(const c10::Storage& storage);
// The host reads or writes memory, which may be page-locked.
void host_touches(Range range, bool writes, const std::string& op);
// Where a tensor's bytes lie.
Range range_of(const at::Tensor& tensor);
// Look from now on at every operator of the host (host.cpp).
void watch_host();

// The numbers that the next random operator draws from: a new seed for each, made of the generator's seed and offset.
uint64_t next_seed(const at::Generator& generator);
const at::Generator& default_generator(int device);

int64_t count_of(const std::string& what);
void count(const std::string& what);
void reset_counts();

}  // namespace rehearsal
