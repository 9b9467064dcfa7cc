// Reads: open, check, one vectored read of header and shards, verify, answer. Files are opened ahead
// of their turn on the medium.
//
// An object in another layout that can be converted takes a second read: the whole of it into a
// scratch buffer, verified there, then copied into the shards asked for in our order. A packed object
// takes its header first, which says where the shards lie, then one read of those asked for.
#pragma once

#include <memory>
#include <vector>

#include "posix/read_item.h"
#include "posix/scratch.h"
#include "posix/slots.h"
#include "posix/worker.h"

namespace ucm::posix {

class ReadWorker final : public Worker {
 public:
  ReadWorker(std::shared_ptr<Core> core, Root& root, EngineKind kind, std::uint32_t depth,
             ReadQueue& queue);

 private:
  enum class State : std::uint8_t {
    kFree,
    kOpening,
    kParked,
    kOpened,  // waits for its turn on the medium
    kReading,
    kNoBuffer,      // of another layout; all scratch buffers are in use
    kReadingWhole,  // the whole object into a scratch buffer
  };
  struct Slot {
    ReadItem item;
    std::shared_ptr<const Fd> dir;
    ObjectPath path{BlockId{}};
    Step open;
    Step reads[2];  // one for header and shards together, or two when the first shard is not wanted
    iovec iov[3];
    std::vector<iovec> parts;  // shards of a packed object; taken with the first such and kept
    std::uint64_t file_bytes = 0;
    std::size_t header_bytes = 0;  // of the header, read
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::int64_t mtime_ns = 0;
    const ForeignLayout* foreign = nullptr;
    ScratchPool::Buffer* scratch = nullptr;  // owned while kReadingWhole
    Clock::time_point begun{};
    Clock::time_point retry_at{};
    std::byte* header = nullptr;
    int fd = -1;
    int pending = 0;
    int failed = 0;  // first errno of the reads
    std::uint8_t tries = 0;
    bool truncated = false;
    bool header_only = false;  // the shards are read once the header has said that they are ours
    bool packed = false;       // its shards are being read
    bool told = false;         // answered with a timeout while the open is stuck
    bool ahead = false;        // not on the medium yet
    State state = State::kFree;
    Slot* next = nullptr;  // while kOpened
  };

  void refill() noexcept override;
  void admit(bool may_take) noexcept override;
  void advance(Step* step) noexcept override;
  std::size_t open_operations() const noexcept override { return slots_.used(); }
  bool work_waits() const noexcept override { return queue_.size() > 0; }
  bool has_room() const noexcept override;
  std::chrono::milliseconds tick(Clock::time_point now) noexcept override;
  void drop_prepared() noexcept override;
  void leak() noexcept override;

  void start_open(Slot& slot) noexcept;
  void opened(Slot& slot) noexcept;
  [[nodiscard]] bool is_other_than_file(const Slot& slot) const noexcept;
  void not_regular(Slot& slot) noexcept;
  /// Takes `slot` out of those that are ahead, if it is one.
  void not_ahead(Slot& slot) noexcept;
  [[nodiscard]] SlotFifo<Slot>& opened_like(const Slot& slot) noexcept {
    return opened_[slot.item.op.urgent ? 0 : 1];
  }
  void start_reads(Slot& slot, bool header_only) noexcept;
  void start_packed(Slot& slot) noexcept;
  void packed_read(Slot& slot) noexcept;
  void start_conversion(Slot& slot) noexcept;
  void converted(Slot& slot) noexcept;
  void convert(const Slot& slot, const std::byte* object, ReadItem& item) noexcept;
  void transferred(Slot& slot, Step& step) noexcept;
  void verify(Slot& slot) noexcept;
  /// True: ours, packed or in another layout. Else the slot has ended.
  bool judge_odd_size(Slot& slot, std::uint64_t bytes) noexcept;
  void corrupt(Slot& slot, const char* why) noexcept;
  void end(Slot& slot, Status status, int error) noexcept;
  void close_file(Slot& slot) noexcept;
  void give_back(Slot& slot) noexcept;
  void answer(ReadItem& item, Clock::time_point begun, Outcome outcome) noexcept;

  ReadQueue& queue_;
  SlotPool<Slot> slots_;
  SlotFifo<Slot> opened_[2];     // urgent ones, others
  std::size_t ahead_ = 0;        // taken from the queue and not put on the medium
  std::size_t background_ = 0;   // open operations that are not urgent
  bool expect_foreign_ = false;  // the last object was in another layout: ask headers first
};

}  // namespace ucm::posix
