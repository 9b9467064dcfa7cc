// Names of objects and temporaries below a namespace directory.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "ucm/block_id.h"

namespace ucm::posix {

inline constexpr std::string_view kTempPrefix = ".tmp-";
inline constexpr std::string_view kNamespaceMark = ".ucm";
/// In a namespace directory of the layout slab: who uses it, and the sizes of its files.
inline constexpr std::string_view kSlabManifest = ".ucm-slab";
inline constexpr int kFanout = 256;  ///< 4,000 files a directory at a million objects

/// "ab/abcdef...": path of an object relative to its namespace directory.
struct ObjectPath {
  static constexpr std::size_t kDir = 2;
  char text[kDir + 1 + 32 + 1];

  explicit ObjectPath(const BlockId& id) noexcept;
  [[nodiscard]] const char* c_str() const noexcept { return text; }
  [[nodiscard]] const char* file() const noexcept { return text + kDir + 1; }
};

/// Parses a file name of 32 lower-case hex digits; false for anything else.
[[nodiscard]] bool parse_object_name(std::string_view name, BlockId& id) noexcept;

/// Two hex digits of a fan-out directory.
struct FanoutName {
  char text[3];
  explicit FanoutName(unsigned index) noexcept;
};

/// Who we are, for temporaries and leases: unique per stage over hosts, reboots and pid namespaces.
struct Identity {
  std::string boot;         ///< kernel boot id, 36 characters
  std::uint64_t pid_space;  ///< inode of the pid namespace; 0 if unknown
  std::int64_t pid;
  std::uint64_t start_ticks;  ///< of the process; tells a recycled pid
  std::string label;          ///< "<boot 8>-<pid>-<nonce 8>"

  static Identity of_this_process();
};

/// Start time of a process in clock ticks since boot; 0 when there is no such process.
[[nodiscard]] std::uint64_t process_start_ticks(std::int64_t pid);

/// Fresh names for private temporaries.
class TempNames {
 public:
  explicit TempNames(const std::string& label) : label_(label) {}
  /// Path relative to the namespace directory, in the same fan-out directory as `object`.
  void next(const ObjectPath& object, char* out, std::size_t size) noexcept;

 private:
  const std::string label_;
  std::atomic<std::uint64_t> counter_{0};
};

}  // namespace ucm::posix
