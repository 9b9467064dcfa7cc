// Writes: hash, create a private temporary, one vectored write, close, rename. Hashes are taken and
// files created ahead of their turn on the medium.
#pragma once

#include <memory>

#include "posix/slots.h"
#include "posix/worker.h"
#include "posix/write_item.h"

namespace ucm::posix {

class WriteWorker final : public Worker {
 public:
  WriteWorker(std::shared_ptr<Core> core, Root& root, EngineKind kind, std::uint32_t depth,
              WriteQueue& queue);

 private:
  enum class State : std::uint8_t {
    kFree,
    kCreating,
    kParked,
    kPrepared,  // waits for its turn on the medium
    kWriting,
    kSyncing,
    kClosing,
    kRenaming
  };
  struct Slot {
    WriteItem item;
    std::shared_ptr<const Fd> dir;
    ObjectPath path{BlockId{}};
    char temp[96];
    Step step;
    std::vector<iovec> iov;  // header and data, or header and every packed shard
    std::uint64_t file_bytes = 0;
    Clock::time_point begun{};
    Clock::time_point retry_at{};
    std::byte* header = nullptr;
    int fd = -1;
    bool temp_exists = false;
    std::uint8_t tries = 0;     // of the step at hand
    std::uint8_t restarts = 0;  // of the whole operation
    bool ahead = false;         // not on the medium yet
    State state = State::kFree;
    Slot* next = nullptr;  // while kPrepared
  };

  void refill() noexcept override;
  void admit(bool may_take) noexcept override;
  void advance(Step* step) noexcept override;
  std::size_t open_operations() const noexcept override { return slots_.used(); }
  bool work_waits() const noexcept override { return queue_.size() > 0; }
  bool has_room() const noexcept override;
  std::chrono::milliseconds tick(Clock::time_point now) noexcept override;
  void drop_prepared() noexcept override;
  void leak() noexcept override { slots_.leak(); }

  void begin_write(Slot& slot) noexcept;
  bool already_stored(Slot& slot) noexcept;
  void create(Slot& slot) noexcept;
  void created(Slot& slot, int result) noexcept;
  /// Loads go first: while there are some, writes keep only part of their depth.
  [[nodiscard]] std::size_t write_depth() const noexcept;
  /// Takes `slot` out of those that are ahead, if it is one.
  void not_ahead(Slot& slot) noexcept;
  void start_write(Slot& slot) noexcept;
  void wrote(Slot& slot, int result) noexcept;
  void close_temp(Slot& slot) noexcept;
  void publish(Slot& slot) noexcept;
  void renamed(Slot& slot, int result) noexcept;
  void park(Slot& slot, int error) noexcept;
  void restart_or_fail(Slot& slot, int error) noexcept;
  void drop_temp(Slot& slot) noexcept;
  void fail(Slot& slot, const char* operation, int error) noexcept;
  void end(Slot& slot, Status status, int error) noexcept;

  WriteQueue& queue_;
  SlotPool<Slot> slots_;
  SlotFifo<Slot> prepared_;
  std::size_t ahead_ = 0;  // taken from the queue and not put on the medium
};

}  // namespace ucm::posix
