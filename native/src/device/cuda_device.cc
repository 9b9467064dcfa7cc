#include "ucm/cuda_device.h"

#include <unistd.h>

#include <cerrno>
#include <map>
#include <thread>
#include <vector>

#include "device/cuda_driver.h"

namespace ucm {
namespace {

using cuda::Driver;
using cuda::kSuccess;
using cuda::Result;

/// The device's context is current on this thread while this lives; what was current before comes back.
class Current {
 public:
  Current(const Driver& driver, cuda::Context context) noexcept
      : driver_(driver), result(driver.context_push(context)) {}
  ~Current() {
    cuda::Context popped = nullptr;
    if (result == kSuccess) (void)driver_.context_pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;

 public:
  const Result result;
};

class CudaDevice;

class CudaEvent final : public Event {
 public:
  CudaEvent(std::shared_ptr<CudaDevice> device, cuda::EventHandle handle)
      : device_(std::move(device)), handle_(handle) {}
  bool fired() noexcept override;
  bool subscribe(std::function<void()>) override { return false; }  // the Store polls
  [[nodiscard]] cuda::EventHandle handle() const noexcept { return handle_; }

 private:
  const std::shared_ptr<CudaDevice> device_;
  const cuda::EventHandle handle_;
};

class CudaDevice final : public Device, public std::enable_shared_from_this<CudaDevice> {
 public:
  explicit CudaDevice(const CudaOptions& options)
      : driver_(options.library), name_("cuda:" + std::to_string(options.ordinal)) {
    const auto need = [&](const char* call, Result r) {
      if (r == kSuccess) return;
      throw DeviceError(name_ + ": " + driver_.describe(call, r) +
                        "; check CUDA_VISIBLE_DEVICES and nvidia-smi");
    };
    need("cuDeviceGet", driver_.device_get(&device_, options.ordinal));
    need("cuDevicePrimaryCtxRetain", driver_.context_retain(&context_, device_));
  }

  ~CudaDevice() override {
    if (::getpid() != pid_) return;  // the context belongs to the parent
    {
      const Current current(driver_, context_);
      for (const auto& lane : lanes_) (void)driver_.stream_destroy(lane->stream);
      for (const auto& [base, pin] : pins_) {
        if (pin.ours) (void)driver_.host_unregister(base);
      }
    }
    (void)driver_.context_release(device_);
  }

  std::string name() const override { return name_; }

  void copy_in(std::byte* dst, const std::uint64_t* addresses, std::size_t runs,
               const RunShape& run) noexcept override {
    Lane* const lane = lane_of_this_thread();
    if (lane == nullptr) return;
    const Current current(driver_, context_);
    for (std::size_t i = 0; i < runs; ++i, dst += run.total()) {
      if (run.count == 1) {
        note(*lane, "cuMemcpyDtoHAsync",
             driver_.to_host(dst, addresses[i], run.bytes, lane->stream));
        continue;
      }
      cuda::Copy2D copy{};
      copy.src_type = cuda::kMemoryDevice;
      copy.src_device = addresses[i];
      copy.src_pitch = run.stride;
      copy.dst_type = cuda::kMemoryHost;
      copy.dst_host = dst;
      copy.dst_pitch = run.bytes;
      copy.width = run.bytes;
      copy.height = run.count;
      note(*lane, "cuMemcpy2DAsync", driver_.copy_2d(&copy, lane->stream));
    }
  }

  void copy_out(const std::byte* src, const std::uint64_t* addresses, std::size_t runs,
                const RunShape& run) noexcept override {
    Lane* const lane = lane_of_this_thread();
    if (lane == nullptr) return;
    const Current current(driver_, context_);
    for (std::size_t i = 0; i < runs; ++i, src += run.total()) {
      if (addresses[i] == 0) continue;
      if (run.count == 1) {
        note(*lane, "cuMemcpyHtoDAsync",
             driver_.to_device(addresses[i], src, run.bytes, lane->stream));
        continue;
      }
      cuda::Copy2D copy{};
      copy.src_type = cuda::kMemoryHost;
      copy.src_host = src;
      copy.src_pitch = run.bytes;
      copy.dst_type = cuda::kMemoryDevice;
      copy.dst_device = addresses[i];
      copy.dst_pitch = run.stride;
      copy.width = run.bytes;
      copy.height = run.count;
      note(*lane, "cuMemcpy2DAsync", driver_.copy_2d(&copy, lane->stream));
    }
  }

  void order_after(Event& event) noexcept override {
    auto* const ours = dynamic_cast<CudaEvent*>(&event);
    Lane* const lane = ours == nullptr ? nullptr : lane_of_this_thread();
    if (lane == nullptr) return;
    const Current current(driver_, context_);
    note(*lane, "cuStreamWaitEvent", driver_.stream_wait(lane->stream, ours->handle(), 0));
  }

  Outcome synchronize() noexcept override {
    const Current current(driver_, context_);
    return outcome("cuCtxSynchronize", driver_.context_synchronize());
  }

  Outcome flush() noexcept override {
    std::unique_lock lock(mu_);
    const auto it = open_.find(std::this_thread::get_id());
    if (it == open_.end()) return {Status::kOk, 0};
    Lane* const lane = it->second;
    open_.erase(it);
    lock.unlock();
    Outcome done{Status::kIoError, ENODEV};
    if (lane != nullptr) {
      const Current current(driver_, context_);
      // Also after an error: what was started before it must not move a byte any more.
      note(*lane, "cuStreamSynchronize", driver_.stream_synchronize(lane->stream));
      done = outcome(lane->call, lane->failed);
      lane->failed = kSuccess;
      lock.lock();
      free_.push_back(lane);
    }
    return done;
  }

  std::shared_ptr<Event> event(std::uint64_t handle) override {
    auto* const named = reinterpret_cast<cuda::EventHandle>(static_cast<std::uintptr_t>(handle));
    const Result r = query(named);
    if (r != kSuccess && r != cuda::kNotReady) {
      (void)outcome("cuEventQuery", r);
      return nullptr;
    }
    return std::make_shared<CudaEvent>(shared_from_this(), named);
  }

  std::string pin(std::span<std::byte> memory) override {
    const std::lock_guard lock(mu_);
    if (const auto it = pins_.find(memory.data()); it != pins_.end()) {
      ++it->second.holders;
      return {};
    }
    const Current current(driver_, context_);
    const Result r = driver_.host_register(memory.data(), memory.size(), cuda::kRegisterPortable);
    if (r != kSuccess && r != cuda::kAlreadyRegistered) {
      return driver_.describe("cuMemHostRegister", r);
    }
    pins_.emplace(memory.data(), Pin{1, memory.size(), r == kSuccess});
    return {};
  }

  void unpin(std::span<std::byte> memory) noexcept override {
    const std::lock_guard lock(mu_);
    const auto it = pins_.find(memory.data());
    if (it == pins_.end() || --it->second.holders != 0) return;
    const Current current(driver_, context_);
    if (it->second.ours) (void)driver_.host_unregister(it->first);
    pins_.erase(it);
  }

  std::map<std::string, std::uint64_t> stats() const override {
    const std::lock_guard lock(mu_);
    std::uint64_t bytes = 0;
    for (const auto& [base, pin] : pins_) bytes += pin.bytes;
    return {{"errors_total", errors_}, {"pinned_bytes", bytes}, {"streams", lanes_.size()}};
  }

  std::string health() const override {
    const std::lock_guard lock(mu_);
    if (errors_ == 0) return {};
    return std::to_string(errors_) + " calls of the driver failed; latest: " + latest_;
  }

  [[nodiscard]] Result query(cuda::EventHandle event) noexcept {
    const Current current(driver_, context_);
    return current.result != kSuccess ? current.result : driver_.event_query(event);
  }

 private:
  /// A stream; belongs to one thread from its first copy to its flush.
  struct Lane {
    cuda::Stream stream = nullptr;
    Result failed = kSuccess;  ///< the first failure since the last flush
    const char* call = "";
  };
  struct Pin {
    std::uint32_t holders = 0;
    std::size_t bytes = 0;
    bool ours = false;
  };

  static void note(Lane& lane, const char* call, Result r) noexcept {
    if (r == kSuccess || lane.failed != kSuccess) return;
    lane.failed = r;
    lane.call = call;
  }

  Outcome outcome(const char* call, Result r) noexcept {
    if (r == kSuccess) return {Status::kOk, 0};
    const std::lock_guard lock(mu_);
    ++errors_;
    latest_ = driver_.describe(call, r);
    return {Status::kIoError, cuda::errno_of(r)};
  }

  /// Null: no stream can be had; flush() tells.
  Lane* lane_of_this_thread() noexcept {
    const std::lock_guard lock(mu_);
    const auto [it, fresh] = open_.try_emplace(std::this_thread::get_id(), nullptr);
    if (!fresh) return it->second;
    if (!free_.empty()) {
      it->second = free_.back();
      free_.pop_back();
      return it->second;
    }
    auto lane = std::make_unique<Lane>();
    const Current current(driver_, context_);
    const Result r = driver_.stream_create(&lane->stream, cuda::kStreamNonBlocking);
    if (r != kSuccess) {
      ++errors_;
      latest_ = driver_.describe("cuStreamCreate", r);
      return nullptr;
    }
    lanes_.push_back(std::move(lane));
    free_.reserve(lanes_.size());
    return it->second = lanes_.back().get();
  }

  const Driver driver_;
  const std::string name_;
  const pid_t pid_ = ::getpid();
  int device_ = 0;
  cuda::Context context_ = nullptr;

  mutable std::mutex mu_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // as many as ever copied at one time
  std::vector<Lane*> free_;
  std::map<std::thread::id, Lane*> open_;
  std::map<std::byte*, Pin> pins_;
  std::uint64_t errors_ = 0;
  std::string latest_;
};

// An event whose state cannot be told any more counts as fired: the copy then fails with the reason.
bool CudaEvent::fired() noexcept { return device_->query(handle_) != cuda::kNotReady; }

}  // namespace

std::shared_ptr<Device> open_cuda_device(CudaOptions options) {
  static std::mutex mu;
  static auto& open = *new std::map<std::pair<std::string, int>, std::weak_ptr<Device>>;
  const std::lock_guard lock(mu);
  std::weak_ptr<Device>& known = open[{options.library, options.ordinal}];
  if (auto device = known.lock()) return device;
  auto device = std::make_shared<CudaDevice>(options);
  known = device;
  return device;
}

}  // namespace ucm
