// Record locks on the segment file: who is alive, and who may attach.
//
// POSIX record locks belong to (process, file): the kernel drops them when the process dies, however
// it dies and only after its memory is gone; a forked child does not inherit them; they work across
// pid namespaces, where "pid + start time" cannot be compared. Two traps, both handled by Segment:
// threads of one process do not exclude each other (a process mutex does), and closing *any*
// descriptor of the file drops all its locks (one descriptor per file and process).
#pragma once

#include <cstdint>

namespace ucm::cache {

class FileLocks {
 public:
  explicit FileLocks(int fd) noexcept : fd_(fd) {}

  /// Take the lock of process record `index` if no other process has it.
  [[nodiscard]] bool try_lock(std::uint32_t index) const noexcept;
  void unlock(std::uint32_t index) const noexcept;
  /// True when another process holds it. Never true for a lock of this process.
  [[nodiscard]] bool held_elsewhere(std::uint32_t index) const noexcept;

  [[nodiscard]] bool try_lock_attach() const noexcept;
  void unlock_attach() const noexcept;
  /// Any process record locked by another process, whatever the layout version.
  [[nodiscard]] bool any_held_elsewhere() const noexcept;
  /// False where the file system has no record locks.
  [[nodiscard]] bool supported() const noexcept;

 private:
  int fd_;
};

}  // namespace ucm::cache
