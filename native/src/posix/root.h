// One root directory: its identity, what its file system can do, its open handles, its health.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "posix/counters.h"
#include "posix/fd.h"
#include "posix/names.h"
#include "ucm/posix.h"

namespace ucm::posix {

enum class Direction : std::uint8_t { kRead = 0, kWrite = 1 };

/// Thread-safe. Directory handles are shared and replaced, never closed under a user.
class Root {
 public:
  /// Creates what is missing, writes the identity, tries the file system. Throws PosixSetupError.
  Root(std::string path, const PosixOptions& options, const Identity& me, Counters& counters,
       ErrorRing& errors);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  /// The identity in `.ucm-root`: the same from every host and under every mount point.
  [[nodiscard]] const BlockId& id() const noexcept { return id_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  /// A file system of this host: metadata calls are quick and may run in place.
  [[nodiscard]] bool local() const noexcept { return local_; }
  [[nodiscard]] std::string describe() const;
  /// "<path>/<namespace>/<name>" for messages.
  [[nodiscard]] std::string full_path(const char* name) const;

  /// Handle of the namespace directory; null while it does not exist.
  [[nodiscard]] std::shared_ptr<const Fd> ns_dir() const;
  /// After ENOENT: true when the handle was stale and has been replaced, so that trying again is
  /// worth it. Cheap when the directory is alive.
  bool revalidate() noexcept;
  /// Make the directories of an object again (they may be deleted while we run). The root directory
  /// itself is never made again: it may be a lost mount. 0 or an errno.
  int make_dirs(const ObjectPath& object) noexcept;
  /// 0 when the directory opened at `root_fd` is this root, else an errno (ESTALE: another one).
  [[nodiscard]] int check_identity(int root_fd) const noexcept;
  /// Handle of the root directory, opened now. Invalid with errno set when it is gone.
  [[nodiscard]] Fd open_root() const noexcept;

  [[nodiscard]] bool serves(Direction d) const noexcept { return out_errno(d) == 0; }
  /// The errno that took the root out; 0 while it serves.
  [[nodiscard]] int out_errno(Direction d) const noexcept {
    return out_[static_cast<int>(d)].load(std::memory_order_relaxed);
  }
  void note_ok(Direction d) noexcept {
    auto& streak = streak_[static_cast<int>(d)];
    if (streak.load(std::memory_order_relaxed) != 0) streak.store(0, std::memory_order_relaxed);
  }
  /// Counts a failure; several in a row on different objects take the root out.
  void note_error(Direction d, int error, const BlockId& id) noexcept;
  void take_out(Direction d, int error, std::string_view why) noexcept;
  /// Try the medium from the root path down; puts the root back in when it works. Blocks.
  bool probe() noexcept;
  /// As probe, but changes nothing: from the root path down, write, read back, compare and delete a
  /// private file. 0 or an errno, with the step that failed in `step`. Blocks.
  int try_medium(std::string& step) noexcept;

 private:
  static constexpr int kFailuresToLeave = 3;

  // With reopen_mutex_ held (or during construction); they ask the medium and may block.
  int reopen(bool create) noexcept;
  int open_namespace(bool create, Fd& ns) noexcept;
  [[nodiscard]] bool path_leads_to_handle() const noexcept;
  int ensure_identity(int root_fd, bool first) noexcept;
  int try_io(int ns_fd, bool direct, const char* name, const char*& step) const noexcept;
  [[noreturn]] void refuse(const std::string& what, int error, const std::string& advice) const;

  const std::string path_;
  const std::string ns_name_;
  const Identity& me_;
  Counters& counters_;
  ErrorRing& errors_;
  const std::shared_ptr<IoFaults> faults_;  // tests
  BlockId id_;
  bool direct_ = false;
  bool local_ = false;
  std::string file_system_;
  std::string direct_note_;
  std::uint64_t device_ = 0;  // st_dev of the root at set-up

  mutable std::mutex mutex_;  // ns_dir_; never held over a system call
  std::shared_ptr<const Fd> ns_dir_;
  std::mutex reopen_mutex_;  // the rest; a hung medium may hold it for long
  std::uint64_t ns_device_ = 0;
  std::uint64_t ns_inode_ = 0;
  std::chrono::steady_clock::time_point last_path_check_{};

  std::atomic<int> out_[2]{};
  std::atomic<int> streak_[2]{};
  std::atomic<std::uint64_t> last_failed_[2]{};
};

}  // namespace ucm::posix
