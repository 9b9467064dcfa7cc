// One small interface over io_uring, Linux AIO and plain system calls.
//
// An engine belongs to one I/O thread: everything but wake() is called on that thread. The unit of
// work is a Step, one system call; state machines (read_worker, write_worker) string them together.
#pragma once

#include <sys/uio.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "posix/fd.h"
#include "ucm/posix.h"

namespace ucm::posix {

/// One system call. Owned by the state machine that starts it; must stay where it is until done.
struct Step {
  IoStep kind = IoStep::kStat;
  int dirfd = -1;               ///< open, rename
  const char* path = nullptr;   ///< open, rename (from); for messages otherwise
  const char* path2 = nullptr;  ///< rename (to)
  int flags = 0;                ///< open
  int fd = -1;                  ///< read, write, sync, close
  iovec* iov = nullptr;         ///< read, write
  int iov_count = 0;
  std::uint64_t offset = 0;
  int result = 0;  ///< >= 0, or a negative errno
  void* owner = nullptr;
};

/// Executes a step with the blocking system call.
void run_step(Step& step) noexcept;

/// Wakes an I/O thread that waits in its engine. Any thread may call wake().
class Waker {
 public:
  Waker();
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// Wakes unconditionally.
  void wake() noexcept;
  /// Wakes only if the thread has armed itself (is about to sleep and can take work).
  bool wake_if_armed() noexcept { return armed_.exchange(false) ? (wake(), true) : false; }
  void arm() noexcept { armed_.store(true); }
  void disarm() noexcept { armed_.store(false); }
  /// Empties the event counter.
  void drain() noexcept;

 private:
  Fd fd_;
  std::atomic<bool> armed_{false};
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;
  /// Steps of this kind go through start(); others are run in place by the caller (run_step).
  [[nodiscard]] virtual bool is_async(IoStep kind) const noexcept = 0;
  /// Operations one thread keeps in flight at most.
  [[nodiscard]] virtual std::uint32_t max_depth() const noexcept = 0;
  /// Queue a step; handed over in one batch by the next flush() or wait().
  virtual void start(Step* step) noexcept = 0;
  virtual void flush() noexcept = 0;
  /// Append finished steps to `done`; sleep until there is one, wake() is called or `timeout` (< 0:
  /// none) has passed. timeout 0 only collects.
  virtual void wait(std::chrono::milliseconds timeout, std::vector<Step*>& done) noexcept = 0;
  /// The thread gives up with steps still inside the kernel: never free what they use.
  virtual void abandon() noexcept {}
};

enum class EngineKind : std::uint8_t { kUring, kAio, kSync };

[[nodiscard]] const char* engine_name(EngineKind kind) noexcept;

/// What can run here, found by trying. `reason` tells why io_uring or AIO cannot.
struct EngineSupport {
  bool uring = false;
  std::string uring_reason;
  bool aio = false;
  std::string aio_reason;
};
[[nodiscard]] EngineSupport probe_engines();

struct EngineChoice {
  EngineKind kind = EngineKind::kSync;
  std::string why;
};

/// What the option `posix_io_engine` means here. Throws PosixSetupError when it cannot be had.
[[nodiscard]] EngineChoice choose_engine(const std::string& asked, const EngineSupport& support,
                                         bool direct);

/// Throws std::system_error when the kernel refuses (limits reached).
[[nodiscard]] std::unique_ptr<IoEngine> make_engine(EngineKind kind, std::uint32_t depth,
                                                    std::shared_ptr<Waker> waker);

// The three implementations; uring and aio throw std::system_error.
std::unique_ptr<IoEngine> make_uring_engine(std::uint32_t depth, std::shared_ptr<Waker> waker);
std::unique_ptr<IoEngine> make_aio_engine(std::uint32_t depth, std::shared_ptr<Waker> waker);
std::unique_ptr<IoEngine> make_sync_engine(std::shared_ptr<Waker> waker);
bool probe_uring(std::string& reason);
bool probe_aio(std::string& reason);

}  // namespace ucm::posix
