// The lease of the one collector of a root: a small file with a heartbeat.
//
// A live lease also carries the collection settings: whoever opens the root with others is refused.
// Two collectors at one moment (a takeover race) remove somewhat more than asked, never wrong files.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "posix/names.h"
#include "ucm/posix.h"

namespace ucm::posix {

/// "capacity=..;trigger=..;..": equal text is equal settings.
[[nodiscard]] std::string settings_text(const PosixGcOptions& options);

class Lease {
 public:
  /// `is_root(fd)`: 0 when the directory opened there is the root, else an errno. Without it every
  /// directory at the path is taken for the root, also the one below a lost mount.
  Lease(std::string root_path, const PosixGcOptions& options, const Identity& me,
        std::function<int(int)> is_root = {});

  enum class Held { kYes, kNo, kConflict, kError };
  /// Take, keep or look at the lease. kConflict: another live collector has other settings.
  Held hold() noexcept;
  /// After kConflict: the other one's settings and name.
  [[nodiscard]] const std::string& other() const noexcept { return other_; }
  [[nodiscard]] int error() const noexcept { return error_; }
  /// The file system's clock, as of the last hold() (hosts may disagree about the time).
  [[nodiscard]] timespec medium_now() const noexcept { return medium_now_; }
  /// Gives it up at once, if it is ours.
  void release() noexcept;

 private:
  struct Content {
    std::string owner;
    std::string boot;
    std::uint64_t pid_space = 0;
    std::int64_t pid = 0;
    std::uint64_t start_ticks = 0;
    std::uint64_t ttl_ms = 0;
    std::string settings;
  };
  [[nodiscard]] std::string encode() const;
  static bool decode(const std::string& text, Content& out);
  [[nodiscard]] bool alive(const Content& c, const timespec& beat) const noexcept;
  int read(int root_fd, Content& content, timespec& beat) const;
  int publish(int root_fd, bool replace);

  const std::string root_path_;
  const PosixGcOptions options_;
  const std::string settings_;
  const Identity& me_;
  const std::function<int(int)> is_root_;
  std::string other_;
  int error_ = 0;
  timespec medium_now_{};
};

}  // namespace ucm::posix
