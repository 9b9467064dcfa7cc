// Reads: pin the slot, one vectored read of its header and shards, verify, unpin, answer.
//
// An object of another layout is read whole into a scratch buffer, verified there, and copied into the
// shards asked for in our order.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "posix/read_item.h"
#include "posix/scratch.h"
#include "posix/slots.h"
#include "posix/worker.h"
#include "slab/parts.h"

namespace ucm::slab {

class ReadWorker final : public posix::Worker {
 public:
  ReadWorker(std::shared_ptr<Parts> parts, std::uint32_t root, posix::EngineKind kind,
             std::uint32_t depth, posix::ReadQueue& queue);

 private:
  enum class State : std::uint8_t {
    kFree,
    kParked,  // no descriptor or scratch buffer just now
    kReading,
    kReadingWhole,  // into a scratch buffer
  };
  struct Slot {
    posix::ReadItem item;
    posix::Step reads[2];  // one for header and shards together, or two when shard 0 is not wanted
    iovec iov[3];
    Index::Found found;
    const posix::ForeignLayout* foreign = nullptr;
    posix::ScratchPool::Buffer* scratch = nullptr;  // owned while kReadingWhole
    Clock::time_point begun{};
    Clock::time_point retry_at{};
    std::byte* header = nullptr;
    int pending = 0;
    int failed = 0;  // first errno of the reads
    std::uint8_t tries = 0;
    bool truncated = false;
    State state = State::kFree;
  };

  void admit(bool may_take) noexcept override;
  void advance(posix::Step* step) noexcept override;
  std::size_t open_operations() const noexcept override { return slots_.used(); }
  bool work_waits() const noexcept override { return queue_.size() > 0; }
  bool has_room() const noexcept override {
    return slots_.any_free() && steps_in_flight() < depth();
  }
  std::chrono::milliseconds tick(Clock::time_point now) noexcept override;
  void leak() noexcept override;

  void start(Slot& slot) noexcept;
  void start_own(Slot& slot, const posix::Step& prototype) noexcept;
  void start_foreign(Slot& slot, const posix::Step& prototype) noexcept;
  void park(Slot& slot) noexcept;
  void verify(Slot& slot) noexcept;
  void converted(Slot& slot) noexcept;
  void convert(const Slot& slot, const std::byte* object, posix::ReadItem& item) noexcept;
  void corrupt(Slot& slot, const char* why) noexcept;
  void vanished(Slot& slot) noexcept;
  [[nodiscard]] bool take_out(Slot& slot, const char* why) noexcept;
  [[nodiscard]] const char* path_of(std::uint32_t extent);
  void answer(posix::ReadItem& item, Clock::time_point begun, Outcome outcome) noexcept;
  void end(Slot& slot, Status status, int error) noexcept;
  void give_back(Slot& slot) noexcept;

  const std::shared_ptr<Parts> parts_;
  posix::ReadQueue& queue_;
  posix::SlotPool<Slot> slots_;
  std::vector<std::string> paths_;  // by extent, made when first needed
  std::size_t background_ = 0;      // open operations that are not urgent
};

}  // namespace ucm::slab
