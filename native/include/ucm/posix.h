// The Posix stage: objects below one or more root directories, in one of two layouts.
//
// Layout `file` (default): one file per object; any number of hosts, any file system.
//
//   <root>/.ucm-root                     identity of the root (placement), written once
//   <root>/.ucm-gc                       lease of the one collector of this root
//   <root>/<namespace>/.ucm              marks a namespace directory: only such are collected
//   <root>/<namespace>/<2 hex>/<32 hex>  one object: header, then shards at fixed aligned offsets
//   <root>/<namespace>/<2 hex>/.tmp-*    private temporary of one writer, renamed when whole
//
// Layout `slab` (opt-in): preallocated files of fixed slots on a local disk, shared by the processes of
// one node, which keep index and allocation in shared memory (native/src/slab/format.h, layout.h).
//
//   <root>/<namespace>/.ucm-slab         sizes, who uses it, heartbeat
//   <root>/<namespace>/slab-<4 digits>   headers of all slots, then the slots, one object each
//
// A reader sees a whole object or none. Rename (slab: a slot's header) is visibility, not durability against power loss: a
// file torn by a power cut fails its checksum and is a miss (see PosixOptions::fsync).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ucm/stage.h"

namespace ucm {

/// The stage cannot be set up as asked. The message names the path, the errno and what to do.
class PosixSetupError : public std::runtime_error {
 public:
  PosixSetupError(const std::string& message, int error)
      : std::runtime_error(message), errno_(error) {}
  /// The errno behind the refusal; 0 when the options contradict each other.
  [[nodiscard]] int error() const noexcept { return errno_; }

 private:
  int errno_;
};

/// The steps that a fault plan may spoil.
enum class IoStep : std::uint8_t {
  kOpenRead,
  kOpenWrite,
  kRead,
  kWrite,
  kSync,
  kClose,
  kRename,
  kStat,
};

/// Fault injection for tests; never set in production, where it costs one untaken branch per step.
class IoFaults {
 public:
  virtual ~IoFaults() = default;
  /// Called on the I/O thread before a step. Return 0 to go on or a negative errno to fail the step
  /// without trying it; `bytes` (reads, writes) may be lowered for a short transfer (a multiple of
  /// kIoAlign where O_DIRECT is on). May block, to play a hung medium.
  virtual int before(IoStep step, const char* path, std::size_t& bytes) noexcept = 0;
  /// Called between two steps of the layout slab, on the thread that takes them; `point` is one of the
  /// names in slab/kill_points.h. A test may kill the process here.
  virtual void at(const char* point) noexcept { (void)point; }
};

/// Garbage collection of a root. Every live instance on one root must agree on these values.
struct PosixGcOptions {
  bool enabled = true;               ///< false: take no part at all (tools)
  std::uint64_t capacity_bytes = 0;  ///< budget over all roots; 0: only orphans are removed
  double trigger = 0.7;              ///< collect above this share of the capacity ...
  double recycle = 0.1;              ///< ... down to trigger - recycle
  double candidate_extra = 0.1;      ///< candidates per directory beyond the recycled share
  std::chrono::milliseconds interval{30'000};
  std::chrono::milliseconds orphan_age{600'000};  ///< temporaries untouched for longer are orphans
  std::chrono::milliseconds lease_ttl{30'000};    ///< a collector silent for longer is replaced
};

struct PosixOptions {
  std::vector<std::string> roots;
  std::string namespace_dir;  ///< one path component
  std::array<std::uint8_t, 32> namespace_digest{};
  bool direct = true;                      ///< O_DIRECT where the file system takes it
  std::string engine = "auto";             ///< auto | io_uring | aio | psync
  std::uint32_t read_threads = 0;          ///< per root, io_uring and aio; 0: by CPU count
  std::uint32_t depth = 0;                 ///< operations in flight per thread; 0: by object size
  std::uint32_t queue_limit = 65'536;      ///< operations waiting per root and direction
  bool fsync = false;                      ///< fdatasync before the rename (power-loss durability)
  bool verify_checksums = true;            ///< false only for diagnosis and negative controls
  std::chrono::milliseconds stall{5'000};  ///< a thread longer in one step is replaced
  std::chrono::milliseconds lookup_timeout{5'000};   ///< network file systems: absent after that
  std::chrono::milliseconds touch_interval{60'000};  ///< access times are renewed at most so often
  std::chrono::milliseconds probe_interval{2'000};   ///< a failed root is tried so often
  PosixGcOptions gc;
  std::shared_ptr<IoFaults> faults;
  std::string layout =
      "file";  ///< file | slab; slab needs gc.capacity_bytes, which it preallocates
  std::string shm_directory =
      "/dev/shm";  ///< slab: where the processes of the node share the index
  /// slab: how long slots into which a killed process was writing stay closed; the kernel may still
  /// finish that write.
  std::chrono::milliseconds quarantine{10'000};
  std::chrono::milliseconds lease_ttl{30'000};  ///< slab: another host silent for longer is gone
};

/// See the header comment. Threads start with the first use of each direction; set-up itself only
/// probes. Use in a child after fork() is refused (kClosed).
class PosixStage : public Stage {
 public:
  /// Facts decided at set-up: engine, and per root path, file system, direct, locality, and why.
  [[nodiscard]] virtual std::map<std::string, std::string> describe() const = 0;
  /// The latest distinct errors, oldest first: operation, path, errno, how often (bounded).
  [[nodiscard]] virtual std::vector<std::string> last_errors() const = 0;
  /// Ask for a collection round now and wait for it to end, at most `timeout`. False: none ran (this
  /// instance is not the collector, or it did not end in time).
  virtual bool collect_now(std::chrono::milliseconds timeout) = 0;
};

/// Throws PosixSetupError.
[[nodiscard]] std::shared_ptr<PosixStage> make_posix_stage(const Geometry& geometry,
                                                           PosixOptions options);

}  // namespace ucm
