// A CUDA device for a torch that was built without one: its guard, streams, events, memory and random states.
//
// Everything runs at once on the CPU, so streams and events order nothing; what they would order is kept in order.cpp.
// Memory is the host's; what may be allocated is decided in Python by the planner's model of the caching allocator.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <tuple>
#include <typeinfo>

namespace rehearsal {

Host* host = nullptr;
int device_count = 0;

namespace {

thread_local int current = 0;
thread_local std::array<int64_t, kMostDevices> current_streams{};
std::atomic<int64_t> streams_made{0};
std::atomic<uintptr_t> blocks_made{0};
std::array<std::atomic<bool>, kMostDevices> contexts{};
std::atomic<pid_t> owner{0};

std::mutex counts_lock;
std::map<std::string, int64_t> counts;

// Page-locked memory, by its address.
struct Pinned {
  size_t bytes;
  Accesses accesses;
};

std::mutex pinned_lock;
std::map<uintptr_t, Pinned> pinned;

constexpr size_t kAlignment = 512;

void* host_memory(size_t bytes) {
  void* address = nullptr;
  TORCH_CHECK(posix_memalign(&address, kAlignment, bytes) == 0, "the host has no ", bytes, " bytes left");
  return address;
}

// A block on the device: memory of its own, or a CPU storage that was adopted.
struct Block {
  int device;
  uintptr_t key;
  void* own = nullptr;
  c10::Storage adopted;
  Accesses accesses;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (owner == getpid()) {  // a forked process frees its copy of the bytes, not the device's
    given_back(block->accesses);
    host->on_free(block->device, block->key);
  }
  std::free(block->own);
  delete block;
}

void account(int device, uintptr_t key, size_t bytes) {
  touch(device);
  const auto refusal = host->on_malloc(device, key, bytes, current_streams[device]);
  TORCH_CHECK_WITH(OutOfMemoryError, refusal.empty(), refusal);
}

void note_recorded(const c10::DataPtr& data, const c10::Stream& stream) {
  count("record_stream");
  if (data.get_deleter() == &free_block) {
    recorded(&static_cast<Block*>(data.get_context())->accesses, stream.device_index(), stream.id());
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kKind, current);
    if (bytes == 0) {
      return {nullptr, device};
    }
    const uintptr_t key = ++blocks_made;
    account(current, key, bytes);
    void* address = host_memory(bytes);
    std::memset(address, 0xFF, bytes);  // NaN in every float type: what others left, which nobody may read
    auto* block = new Block{current, key, address, {}, {}};
    given_out(block->accesses, current, "whoever had this memory before");
    return {address, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  // What `torch.accelerator` asks; `torch.cuda` asks Python (torch_cuda.py).
  bool initialized() override {
    return host != nullptr && device_count > 0;
  }
  void emptyCache(c10::MempoolId_t) override {
    host->on_empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    note_recorded(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto found = host->on_statistics(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.active_bytes[0].current = found[0];
    stats.allocated_bytes[0].peak = stats.active_bytes[0].peak = found[1];
    stats.reserved_bytes[0].current = found[2];
    stats.reserved_bytes[0].peak = found[3];
    stats.allocation[0].allocated = found[6];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    host->on_reset_peaks(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) {  // torch 2.11 may not have it to override
    touch(device);
    const auto found = host->on_statistics(device);
    return {found[4], found[5]};
  }
};

void free_pinned(void* address) {
  const std::lock_guard<std::mutex> held(pinned_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(address));
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    touch(current);  // page-locking happens in a context
    void* address = host_memory(std::max<size_t>(bytes, 1));
    register_pinned(reinterpret_cast<uintptr_t>(address), bytes);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

// The page-locked memory that an address lies in, or nothing; its lock must be held.
Pinned* pinned_at(const void* address) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  auto next = pinned.upper_bound(place);
  if (next == pinned.begin()) {
    return nullptr;
  }
  --next;
  return place < next->first + std::max<size_t>(next->second.bytes, 1) ? &next->second : nullptr;
}

DeviceMemory device_memory;
PinnedMemory pinned_memory;
const bool registered = [] {
  c10::SetAllocator(kKind, &device_memory);
  return true;
}();

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kKind, static_cast<c10::DeviceIndex>(device)), id);
}

using Clock = std::chrono::steady_clock;

struct Event {
  Clock::time_point recorded;
  Known known;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kKind;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kKind, static_cast<c10::DeviceIndex>(current)};
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current : device.index();
    return stream_of(index, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current : device.index();
    return stream_of(index, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    count("stream");
    const auto index = device.index() < 0 ? current : device.index();
    touch(index);
    return stream_of(index, ++streams_made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    count("event recorded");
    touch(stream.device_index());
    if (*event == nullptr) {
      *event = new Event;
    }
    *static_cast<Event*>(*event) = {Clock::now(), event_on(stream.device_index(), stream.id())};
  }
  void block(void* event, const c10::Stream& stream) const override {
    count("stream waits for an event");
    if (event != nullptr) {
      stream_waits_for(stream.device_index(), stream.id(), static_cast<Event*>(event)->known);
    }
  }
  bool queryEvent(void* event) const override {
    if (event != nullptr) {  // it says that all is done
      host_waits_for(static_cast<Event*>(event)->known);
    }
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for_stream(stream.device_index(), stream.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits_for_stream(stream.device_index(), stream.id());
    host->on_note("wait", "a stream's synchronize()");
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      host_waits_for(static_cast<Event*>(event)->known);
    }
    host->on_note("wait", "an event's synchronize()");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    touch(device);  // as the driver does: to wait for a card opens a context there
    synchronised_device("synchronize()", device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    note_recorded(data, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const auto between = static_cast<Event*>(second)->recorded - static_cast<Event*>(first)->recorded;
    return std::chrono::duration<double, std::milli>(between).count();
  }
};

C10_REGISTER_GUARD_IMPL(REHEARSED, Guard)

// Seed and offset, 16 bytes, as CUDA's generators have it.
struct DeviceGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;

  explicit DeviceGenerator(int device)
      : GeneratorImpl(
            c10::Device(kKind, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(kKey)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

int index_or_current(c10::DeviceIndex index) {
  return index < 0 ? current : index;
}

}  // namespace

#ifdef REHEARSE_XPU
using HooksInterface = at::XPUHooksInterface;
const auto& kept_hooks() {
  return at::detail::getXPUHooks();
}
#else
using HooksInterface = at::CUDAHooksInterface;
const auto& kept_hooks() {
  return at::detail::getCUDAHooks();
}
#endif

struct Hooks final : HooksInterface {
#ifdef REHEARSE_XPU
  bool hasXPU() const override {
    return device_count > 0;
  }
  int32_t getGlobalIdxFromDevice(const c10::Device& device) const override {
    return device.index();
  }
  c10::DeviceIndex getNumGPUs() const override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
#else
  bool hasCUDA() const override {
    return device_count > 0;
  }
  bool hasCUDART() const override {
    return true;
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &device_memory;
  }
  int getNumGPUs() const override {
    return device_count;
  }
#endif
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return has_context(index);
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
  c10::DeviceIndex current_device() const override {
    return static_cast<c10::DeviceIndex>(current);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    current = index;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = static_cast<c10::DeviceIndex>(current);
    current = index_or_current(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_or_current(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index_or_current(index));
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kKind, static_cast<c10::DeviceIndex>(current)};
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    synchronised_device("synchronize()", device);
  }
  std::string showConfig() const override {
    return "pretend " REHEARSED_NAME;
  }
};

int current_device() {
  return current;
}

void set_current_device(int index) {
  current = index;
}

bool is_forked() {
  return owner != 0 && owner != getpid();
}

void touch(int device) {
  const pid_t here = getpid();
  pid_t nobody = 0;
  if (!owner.compare_exchange_strong(nobody, here)) {
    TORCH_CHECK(
        nobody == here,
        "CUDA error: initialization error (this process was forked from one that had used CUDA; start it anew)");
  }
  TORCH_CHECK(device < device_count, "CUDA error: invalid device ordinal");
  contexts[device] = true;
}

bool has_context(int device) {
  return device >= 0 && device < device_count && contexts[device];
}

int64_t current_stream(int device) {
  return current_streams[device];
}

void synchronised(const std::string& what, int device) {
  host_waits_for_stream(device, current_streams[device]);
  host->on_note("wait", what);
}

void synchronised_device(const std::string& what, int device) {
  host_waits_for_device(device);
  host->on_note("wait", what);
}

Accesses* accesses_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  if (data.get_deleter() == &free_block) {
    return &static_cast<Block*>(data.get_context())->accesses;
  }
  const std::lock_guard<std::mutex> held(pinned_lock);
  auto* found = pinned_at(data.get());
  return found == nullptr ? nullptr : &found->accesses;
}

Range range_of(const at::Tensor& tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
  const auto size = tensor.element_size();
  return {
      begin + tensor.storage_offset() * size,
      begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), size, tensor.storage_offset())};
}

void host_touches(Range range, bool writes, const std::string& op) {
  Accesses* block = nullptr;
  {
    const std::lock_guard<std::mutex> held(pinned_lock);
    auto* found = pinned_at(reinterpret_cast<void*>(range.begin));
    block = found == nullptr ? nullptr : &found->accesses;
  }
  if (block != nullptr) {
    host_uses(*block, range, writes, op);
  }
}

c10::Storage adopt(const c10::Storage& made_on_cpu, int device, const char* op) {
  const size_t bytes = made_on_cpu.nbytes();
  const c10::Device place(kKind, static_cast<c10::DeviceIndex>(device));
  if (made_on_cpu.data() == nullptr) {
    return c10::Storage(
        c10::make_intrusive<c10::StorageImpl>(
            c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, place), &device_memory, true));
  }
  auto* address = made_on_cpu.mutable_data();
  const uintptr_t key = ++blocks_made;
  account(device, key, bytes);
  auto* block = new Block{device, key, nullptr, made_on_cpu, {}};
  given_out(block->accesses, device, op);
  c10::DataPtr data(address, block, &free_block, place);
  return c10::Storage(
      c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), &device_memory, true));
}

// How often the workspaces were cleared: those that were taken before do not count any more.
static std::atomic<int64_t> clearings{0};

void open_handle(int device) {
  static thread_local std::set<std::tuple<int, int64_t, int64_t>> open;
  if (open.emplace(device, current_streams[device], clearings.load()).second) {
    const auto refusal = host->on_workspace(device, current_streams[device]);
    TORCH_CHECK_WITH(OutOfMemoryError, refusal.empty(), refusal);
  }
}

void close_handles() {
  ++clearings;
}

void register_pinned(uintptr_t address, size_t bytes) {
  static std::once_flag watches;
  std::call_once(watches, watch_host);
  const std::lock_guard<std::mutex> held(pinned_lock);
  pinned[address] = {bytes, {}};
}

void unregister_pinned(uintptr_t address) {
  const std::lock_guard<std::mutex> held(pinned_lock);
  pinned.erase(address);
}

bool is_pinned(const void* address) {
  const std::lock_guard<std::mutex> held(pinned_lock);
  return pinned_at(address) != nullptr;
}

uint64_t next_seed(const at::Generator& generator) {
  auto* numbers = generator.get<DeviceGenerator>();
  const std::lock_guard<std::mutex> held(numbers->mutex_);
  uint64_t mixed = numbers->seed_ * 0x9E3779B97F4A7C15ULL + (numbers->offset_ + 1) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
  numbers->offset_ += 4;
  return mixed ^ (mixed >> 31);
}

const at::Generator& default_generator(int device) {
  static std::array<at::Generator, kMostDevices> generators;
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  TORCH_CHECK(device >= 0 && device < device_count, "CUDA error: invalid device ordinal");
  if (!generators[device].defined()) {
    generators[device] = at::make_generator<DeviceGenerator>(device);
  }
  return generators[device];
}

void count(const std::string& what) {
  const std::lock_guard<std::mutex> held(counts_lock);
  ++counts[what];
}

int64_t count_of(const std::string& what) {
  const std::lock_guard<std::mutex> held(counts_lock);
  const auto found = counts.find(what);
  return found == counts.end() ? 0 : found->second;
}

void reset_counts() {
  const std::lock_guard<std::mutex> held(counts_lock);
  counts.clear();
}

void take_hooks() {
  // Whatever asked first made torch keep the hooks of a build without the device. They have no members: ours take their place.
  const auto& kept = kept_hooks();
  if (typeid(kept) == typeid(HooksInterface)) {
    static_assert(sizeof(Hooks) == sizeof(HooksInterface));
    new (const_cast<HooksInterface*>(&kept)) Hooks();
  }
}

}  // namespace rehearsal
