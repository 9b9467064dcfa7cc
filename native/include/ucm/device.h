// The device seam: where engine memory lives and how its streams are waited for.
//
// The Store copies only through a Device, so another kind of memory is another implementation of
// this file and nothing else. Host memory and CUDA (cuda_device.h) are built in; devices of plugins come
// with their own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ucm/geometry.h"
#include "ucm/status.h"

namespace ucm {

/// Something a dump waits for before it reads its source: "the kernel that writes it has finished".
/// Thread-safe. Fires at most once and stays fired.
class Event {
 public:
  virtual ~Event() = default;
  [[nodiscard]] virtual bool fired() noexcept = 0;
  /// Call `wake` once when it fires (at once if it has). Returns false when the event cannot call
  /// back: the Store polls fired() instead. `wake` must be cheap and may run on any thread.
  virtual bool subscribe(std::function<void()> wake) = 0;
};

/// An event that host code fires. Named by an integer that crosses the language border; the name is
/// valid until the object is destroyed and is never used again.
class HostEvent final : public Event {
 public:
  /// Create one and register its name.
  static std::shared_ptr<HostEvent> create();
  ~HostEvent() override;

  void fire();
  [[nodiscard]] std::uint64_t handle() const noexcept { return handle_; }
  [[nodiscard]] bool fired() noexcept override;
  bool subscribe(std::function<void()> wake) override;

 private:
  explicit HostEvent(std::uint64_t handle) : handle_(handle) {}
  const std::uint64_t handle_;
  std::atomic<bool> fired_{false};
  std::mutex mu_;
  std::vector<std::function<void()>> wakes_;  // under mu_, emptied by fire()
};

/// Engine memory of one kind. Thread-safe. Copies may be asynchronous until flush() of the same
/// thread returns; only then are the bytes in place and the source free.
class Device {
 public:
  virtual ~Device() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  /// Gather runs of engine memory into `dst` (see copy_runs_in).
  virtual void copy_in(std::byte* dst, const std::uint64_t* addresses, std::size_t runs,
                       const RunShape& run) noexcept = 0;
  /// Scatter `src` to runs of engine memory; address 0 skips the run (see copy_runs_out).
  virtual void copy_out(const std::byte* src, const std::uint64_t* addresses, std::size_t runs,
                        const RunShape& run) noexcept = 0;
  /// kIoError: a copy of this thread since its last flush failed; nothing of them counts. Nothing of
  /// them moves any more either way.
  [[nodiscard]] virtual Outcome flush() noexcept = 0;
  /// The event with this name; null when there is none. The event that it names must exist until the
  /// task that waits for it is done.
  [[nodiscard]] virtual std::shared_ptr<Event> event(std::uint64_t handle) = 0;
  /// What this thread copies from here to its next flush() is read after `event`, on the device too.
  virtual void order_after(Event& event) noexcept { (void)event; }
  /// Wait until all work submitted to the device so far is over.
  [[nodiscard]] virtual Outcome synchronize() noexcept { return {Status::kOk, 0}; }
  /// Let the device reach this host memory directly until as many unpin() calls follow. Returns why it
  /// cannot be: copies work all the same, more slowly.
  [[nodiscard]] virtual std::string pin(std::span<std::byte> memory) {
    (void)memory;
    return {};
  }
  virtual void unpin(std::span<std::byte> memory) noexcept { (void)memory; }
  /// Counters, names with units; merged by the Store under name().
  [[nodiscard]] virtual std::map<std::string, std::uint64_t> stats() const { return {}; }
  /// Empty when healthy, else what is wrong.
  [[nodiscard]] virtual std::string health() const { return {}; }
};

/// Plain host memory; events are HostEvents.
[[nodiscard]] std::shared_ptr<Device> host_device();

}  // namespace ucm
