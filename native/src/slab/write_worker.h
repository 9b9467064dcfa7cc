// Writes: whole objects into free slots of a group, then one page of slot heads for all of them. Slots
// are taken and checksums computed ahead of an object's turn on the medium.
//
//   take a group -> [page: its free slots are free] -> data of up to a group's objects in flight
//     -> [flush] -> page: these slots hold these objects -> [flush] -> into the index -> answers
//
// The page comes first only where the medium still calls one of the slots used.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "posix/slots.h"
#include "posix/worker.h"
#include "posix/write_item.h"
#include "slab/parts.h"

namespace ucm::slab {

class WriteWorker final : public posix::Worker {
 public:
  WriteWorker(std::shared_ptr<Parts> parts, std::uint32_t root, posix::EngineKind kind,
              std::uint32_t depth, posix::WriteQueue& queue);

 private:
  struct StepOwner {
    bool is_batch = false;
  };
  struct Batch;
  struct Slot : StepOwner {
    posix::WriteItem item;
    posix::Step step;
    iovec iov[2];
    Clock::time_point begun{};
    std::byte* header = nullptr;
    Batch* batch = nullptr;
    std::uint32_t slot = kNone;
    std::uint8_t tries = 0;
    bool ahead = false;  // not on the medium yet
  };
  enum class State : std::uint8_t {
    kUnused,
    kInvalidating,  // the page is on its way; data wait for it
    kFilling,
    kFlushing,
    kCommitting,
    kSealing,  // flushing the page
  };
  struct Batch : StepOwner {
    OwnedGroup owned;
    posix::Step step;
    iovec iov[1];
    std::byte* header = nullptr;  // the page
    std::string path;
    int fd = -1;
    std::vector<Slot*> waiting;  // for the page
    std::vector<Slot*> written;
    std::vector<std::uint32_t> slots;  // of `written`
    std::size_t open = 0;              // objects that have a slot of it and are not written
    std::uint8_t tries = 0;
    State state = State::kUnused;
  };

  void refill() noexcept override;
  void admit(bool may_take) noexcept override;
  void advance(posix::Step* step) noexcept override;
  std::size_t open_operations() const noexcept override { return slots_.used(); }
  bool work_waits() const noexcept override { return queue_.size() > 0; }
  bool has_room() const noexcept override;
  std::chrono::milliseconds tick(Clock::time_point now) noexcept override;
  void drop_prepared() noexcept override;
  void leak() noexcept override;

  void begin_write(posix::WriteItem&& item, Clock::time_point now) noexcept;
  void place(Slot& slot) noexcept;
  [[nodiscard]] Batch* batch_with_room() noexcept;
  [[nodiscard]] Batch* open_batch(int& error) noexcept;
  /// Loads go first: while there are some, writes keep only part of their depth.
  [[nodiscard]] std::size_t write_depth() const noexcept;
  void not_ahead(Slot& slot) noexcept;
  void start_page(Batch& batch, State state) noexcept;
  void start_data(Slot& slot) noexcept;
  void start_sync(Batch& batch, State state) noexcept;
  void data_written(Slot& slot) noexcept;
  void batch_advanced(Batch& batch) noexcept;
  void settle(bool may_take) noexcept;
  void publish(Batch& batch) noexcept;
  void fail_batch(Batch& batch, const char* operation, int error) noexcept;
  void release(Batch& batch) noexcept;
  void free_slot(Slot& slot) noexcept;
  void fail(Slot& slot, const char* operation, int error) noexcept;
  void end(Slot& slot, Outcome outcome) noexcept;

  const std::shared_ptr<Parts> parts_;
  const std::uint32_t root_index_;
  posix::WriteQueue& queue_;
  posix::SlotPool<Slot> slots_;
  posix::SlotPool<Batch> batches_;
  posix::Ring<Slot*> prepared_;
  std::size_t ahead_ = 0;   // taken from the queue and not put on the medium
  Slot* parked_ = nullptr;  // all slots of the root are being written or read: tried again
};

}  // namespace ucm::slab
