#include <unordered_map>

#include "ucm/copy.h"
#include "ucm/device.h"

namespace ucm {
namespace {

/// Names of live host events. An integer name is all that crosses the language border, so the map
/// from name to object has to be one per process.
struct EventNames {
  std::mutex mu;
  std::unordered_map<std::uint64_t, std::weak_ptr<HostEvent>> live;
  std::uint64_t next = 1;
};

EventNames& names() {
  static EventNames* const table = new EventNames;  // outlives every static destructor
  return *table;
}

class HostDevice final : public Device {
 public:
  std::string name() const override { return "host"; }
  void copy_in(std::byte* dst, const std::uint64_t* addresses, std::size_t runs,
               const RunShape& run) noexcept override {
    copy_runs_in(dst, addresses, runs, run);
  }
  void copy_out(const std::byte* src, const std::uint64_t* addresses, std::size_t runs,
                const RunShape& run) noexcept override {
    copy_runs_out(src, addresses, runs, run);
  }
  Outcome flush() noexcept override { return {Status::kOk, 0}; }
  std::shared_ptr<Event> event(std::uint64_t handle) override {
    EventNames& table = names();
    const std::lock_guard lock(table.mu);
    const auto it = table.live.find(handle);
    return it == table.live.end() ? nullptr : it->second.lock();
  }
};

}  // namespace

std::shared_ptr<HostEvent> HostEvent::create() {
  EventNames& table = names();
  const std::lock_guard lock(table.mu);
  std::shared_ptr<HostEvent> event(new HostEvent(table.next++));
  table.live.emplace(event->handle_, event);
  return event;
}

HostEvent::~HostEvent() {
  EventNames& table = names();
  const std::lock_guard lock(table.mu);
  table.live.erase(handle_);
}

void HostEvent::fire() {
  std::vector<std::function<void()>> wakes;
  {
    const std::lock_guard lock(mu_);
    fired_.store(true, std::memory_order_release);
    wakes.swap(wakes_);
  }
  for (auto& wake : wakes) wake();
}

bool HostEvent::fired() noexcept { return fired_.load(std::memory_order_acquire); }

bool HostEvent::subscribe(std::function<void()> wake) {
  {
    const std::lock_guard lock(mu_);
    if (!fired_.load(std::memory_order_relaxed)) {
      wakes_.push_back(std::move(wake));
      return true;
    }
  }
  wake();
  return true;
}

std::shared_ptr<Device> host_device() {
  static const std::shared_ptr<Device> device = std::make_shared<HostDevice>();
  return device;
}

}  // namespace ucm
