// A CUDA driver for tests: the symbols of libcuda.so.1 that we and our tests use, over host memory.
//
// Device memory is host memory. Whatever is queued on a stream runs late, on a thread of the stream: a
// missing wait shows as wrong bytes. Calls are recorded in order. Knobs (stub_set) make a single guard
// useless, so that a test can show what each of them is good for.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Result = int;
using DevicePtr = unsigned long long;

constexpr Result kOk = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kNotInitialised = 3;
constexpr Result kInvalidDevice = 101;
constexpr Result kInvalidContext = 201;
constexpr Result kInvalidHandle = 400;
constexpr Result kNotReady = 600;
constexpr Result kAlreadyRegistered = 712;
constexpr Result kNotRegistered = 713;

struct Event {
  std::uint64_t recorded = 0;
  std::uint64_t completed = 0;
};

struct Stream {
  std::deque<std::function<void(std::unique_lock<std::mutex>&)>> queue;
  bool busy = false;
  bool stop = false;
  std::thread thread;
};

struct World {
  std::mutex mu;
  std::condition_variable cv;
  bool initialised = false;
  int retained = 0;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<void*, std::size_t> registered;
  std::map<std::string, long> knobs;
  std::string calls;
};

World& world() {
  static World* const w = new World;
  return *w;
}
int context_object;
thread_local std::vector<void*> current;

long knob(const std::string& name) {
  const auto it = world().knobs.find(name);
  return it == world().knobs.end() ? 0 : it->second;
}

/// Record a call; returns what it is to fail with. `mu` held.
Result begin(const char* call, bool needs_context = true) {
  World& w = world();
  w.calls += std::string(call) + "\n";
  if (!w.initialised && std::strcmp(call, "cuInit") != 0) return kNotInitialised;
  if (needs_context && current.empty()) return kInvalidContext;
  return static_cast<Result>(knob(std::string("fail:") + call));
}

void serve(Stream& stream) {
  World& w = world();
  std::unique_lock lock(w.mu);
  while (true) {
    w.cv.wait(lock, [&] { return stream.stop || !stream.queue.empty(); });
    if (stream.queue.empty()) return;
    auto work = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.busy = true;
    const auto delay = std::chrono::microseconds(knob("delay_us"));
    lock.unlock();
    std::this_thread::sleep_for(delay);
    lock.lock();
    work(lock);
    stream.busy = false;
    w.cv.notify_all();
  }
}

void push(Stream* stream, std::function<void(std::unique_lock<std::mutex>&)> work) {
  stream->queue.push_back(std::move(work));
  world().cv.notify_all();
}

bool idle(const Stream& stream) { return stream.queue.empty() && !stream.busy; }

std::byte* at(DevicePtr p) { return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(p)); }

}  // namespace

extern "C" {

// ---- controls of tests ----

void stub_set(const char* name, long value) {
  const std::lock_guard lock(world().mu);
  world().knobs[name] = value;
}
void stub_reset() {
  const std::lock_guard lock(world().mu);
  world().knobs.clear();
  world().calls.clear();
}
/// The calls so far, one a line; valid until the next call of this function.
const char* stub_calls() {
  static std::string copy;
  const std::lock_guard lock(world().mu);
  copy = world().calls;
  return copy.c_str();
}
long stub_live(const char* what) {
  World& w = world();
  const std::lock_guard lock(w.mu);
  const std::string name(what);
  if (name == "streams") return static_cast<long>(w.streams.size());
  if (name == "registered") return static_cast<long>(w.registered.size());
  if (name == "registered_bytes") {
    long bytes = 0;
    for (const auto& [p, n] : w.registered) bytes += static_cast<long>(n);
    return bytes;
  }
  return name == "contexts" ? w.retained : -1;
}

// ---- the driver ----

Result cuInit(unsigned) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuInit", false);
  if (r == kOk) world().initialised = true;
  return r;
}

Result cuDeviceGet(int* device, int ordinal) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuDeviceGet", false);
  if (r == kOk && ordinal != 0) return kInvalidDevice;
  *device = ordinal;
  return r;
}

Result cuDevicePrimaryCtxRetain(void** context, int) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuDevicePrimaryCtxRetain", false);
  if (r != kOk) return r;
  ++world().retained;
  *context = &context_object;
  return kOk;
}

Result cuDevicePrimaryCtxRelease_v2(int) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuDevicePrimaryCtxRelease", false);
  if (r == kOk) --world().retained;
  return r;
}

Result cuCtxPushCurrent_v2(void* context) {
  if (context != &context_object) return kInvalidContext;
  current.push_back(context);
  return kOk;
}

Result cuCtxPopCurrent_v2(void** context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return kOk;
}

Result cuCtxSynchronize() {
  World& w = world();
  std::unique_lock lock(w.mu);
  const Result r = begin("cuCtxSynchronize");
  if (r != kOk) return r;
  w.cv.wait(lock, [&] {
    return std::all_of(w.streams.begin(), w.streams.end(), [](Stream* s) { return idle(*s); });
  });
  return kOk;
}

Result cuStreamCreate(Stream** out, unsigned) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuStreamCreate");
  if (r != kOk) return r;
  auto* const stream = new Stream;
  stream->thread = std::thread([stream] { serve(*stream); });
  world().streams.insert(stream);
  *out = stream;
  return kOk;
}

Result cuStreamDestroy_v2(Stream* stream) {
  {
    const std::lock_guard lock(world().mu);
    const Result r = begin("cuStreamDestroy");
    if (r != kOk) return r;
    if (world().streams.erase(stream) == 0) return kInvalidHandle;
    stream->stop = true;
    world().cv.notify_all();
  }
  stream->thread.join();
  delete stream;
  return kOk;
}

Result cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuStreamWaitEvent");
  if (r != kOk) return r;
  if (!world().events.contains(event)) return kInvalidHandle;
  if (knob("ignore_wait") != 0) return kOk;
  push(stream, [event, until = event->recorded](std::unique_lock<std::mutex>& held) {
    world().cv.wait(held, [&] { return event->completed >= until; });
  });
  return kOk;
}

Result cuStreamSynchronize(Stream* stream) {
  World& w = world();
  std::unique_lock lock(w.mu);
  const Result r = begin("cuStreamSynchronize");
  if (knob("early_sync") == 0) w.cv.wait(lock, [&] { return idle(*stream); });
  return r;
}

Result cuEventCreate(Event** out, unsigned) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuEventCreate");
  if (r != kOk) return r;
  *out = new Event;
  world().events.insert(*out);
  return kOk;
}

Result cuEventDestroy_v2(Event* event) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuEventDestroy");
  if (r != kOk) return r;
  if (world().events.erase(event) == 0) return kInvalidHandle;
  delete event;
  return kOk;
}

Result cuEventRecord(Event* event, Stream* stream) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuEventRecord");
  if (r != kOk) return r;
  push(stream, [event, mark = ++event->recorded](std::unique_lock<std::mutex>&) {
    event->completed = mark;
  });
  return kOk;
}

Result cuEventQuery(Event* event) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuEventQuery");
  if (r != kOk) return r;
  if (!world().events.contains(event)) return kInvalidHandle;
  if (knob("query_lies") != 0) return kOk;
  return event->completed >= event->recorded ? kOk : kNotReady;
}

Result cuMemcpyDtoHAsync_v2(void* to, DevicePtr from, std::size_t n, Stream* stream) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuMemcpyDtoHAsync");
  if (r != kOk) return r;
  push(stream, [=](std::unique_lock<std::mutex>&) { std::memcpy(to, at(from), n); });
  return kOk;
}

Result cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, std::size_t n, Stream* stream) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuMemcpyHtoDAsync");
  if (r != kOk) return r;
  push(stream, [=](std::unique_lock<std::mutex>&) { std::memcpy(at(to), from, n); });
  return kOk;
}

struct Copy2D {
  std::size_t src_x, src_y;
  int src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  std::size_t src_pitch;
  std::size_t dst_x, dst_y;
  int dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  std::size_t dst_pitch;
  std::size_t width, height;
};

Result cuMemcpy2DAsync_v2(const Copy2D* asked, Stream* stream) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuMemcpy2DAsync");
  if (r != kOk) return r;
  const Copy2D c = *asked;
  if (c.src_x != 0 || c.src_y != 0 || c.dst_x != 0 || c.dst_y != 0 || c.src_pitch < c.width ||
      c.dst_pitch < c.width) {
    return kInvalidValue;
  }
  push(stream, [c](std::unique_lock<std::mutex>&) {
    const auto* const from =
        c.src_type == 1 ? static_cast<const std::byte*>(c.src_host) : at(c.src_device);
    auto* const to = c.dst_type == 1 ? static_cast<std::byte*>(c.dst_host) : at(c.dst_device);
    for (std::size_t y = 0; y < c.height; ++y) {
      std::memcpy(to + y * c.dst_pitch, from + y * c.src_pitch, c.width);
    }
  });
  return kOk;
}

Result cuMemsetD8Async(DevicePtr to, unsigned char value, std::size_t n, Stream* stream) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuMemsetD8Async");
  if (r != kOk) return r;
  push(stream, [=](std::unique_lock<std::mutex>&) { std::memset(at(to), value, n); });
  return kOk;
}

Result cuMemcpyHtoD_v2(DevicePtr to, const void* from, std::size_t n) {
  const std::lock_guard lock(world().mu);
  std::memcpy(at(to), from, n);
  return kOk;
}

Result cuMemcpyDtoH_v2(void* to, DevicePtr from, std::size_t n) {
  const std::lock_guard lock(world().mu);
  std::memcpy(to, at(from), n);
  return kOk;
}

Result cuMemAlloc_v2(DevicePtr* out, std::size_t n) {
  *out = reinterpret_cast<DevicePtr>(std::aligned_alloc(256, (n + 255) / 256 * 256));
  return *out == 0 ? 2 : kOk;
}

Result cuMemFree_v2(DevicePtr p) {
  std::free(at(p));
  return kOk;
}

Result cuMemHostRegister_v2(void* p, std::size_t n, unsigned) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuMemHostRegister");
  if (r != kOk) return r;
  return world().registered.emplace(p, n).second ? kOk : kAlreadyRegistered;
}

Result cuMemHostUnregister(void* p) {
  const std::lock_guard lock(world().mu);
  const Result r = begin("cuMemHostUnregister");
  if (r != kOk) return r;
  return world().registered.erase(p) == 1 ? kOk : kNotRegistered;
}

Result cuGetErrorName(Result r, const char** out) {
  *out = r == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : r == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return *out == nullptr ? kInvalidValue : kOk;
}

Result cuGetErrorString(Result r, const char** out) {
  *out = r == 700 ? "an illegal memory access was encountered" : r == 2 ? "out of memory" : nullptr;
  return *out == nullptr ? kInvalidValue : kOk;
}

}  // extern "C"
