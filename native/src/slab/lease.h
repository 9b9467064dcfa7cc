// `.ucm-slab` in a namespace directory: the sizes of its files, and which host uses it.
//
// Two guards. A record lock on it, held by every process that uses the directory, excludes processes of
// this host that do not share our index (another container, another set of directories). Host and
// heartbeat in its text exclude other hosts, in case the directory is not local after all.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "posix/fd.h"

namespace ucm::slab {

struct HostName {
  std::string host;
  std::string machine;  ///< /etc/machine-id; empty where there is none
  std::string boot;     ///< boot id
  static HostName of_this_host();
};

/// One per root and process: closing any descriptor of the file drops the process's locks on it.
class Lease {
 public:
  /// Opens or creates the file. Throws PosixSetupError.
  Lease(std::string ns_path, std::chrono::milliseconds ttl);

  /// Before the index is created: nobody else may use the directory. Throws PosixSetupError that names
  /// both hosts (or both sets of processes). The lock is exclusive until share().
  void take();
  /// The index exists: publish the sizes, hold the lock together with those who attach.
  void share(std::uint64_t slab_bytes, std::uint32_t slabs);
  /// Attach to an index that others use. Throws PosixSetupError.
  void join();

  /// Of an earlier use; 0: a fresh directory.
  [[nodiscard]] std::uint64_t slab_bytes() const noexcept { return slab_bytes_; }

  /// Renews the heartbeat; blocks on the medium. False: another host has taken the directory.
  bool beat() noexcept;
  /// The last process leaves: any host may take the directory at once. Nothing unless it is ours.
  void release() noexcept;

 private:
  int write(bool in_use) noexcept;
  int read(std::string& text) const noexcept;
  [[nodiscard]] std::chrono::milliseconds age() const;
  [[noreturn]] void refuse(const std::string& why, int error) const;

  const std::string path_;
  const std::string ns_path_;
  const std::chrono::milliseconds ttl_;
  const HostName me_;
  posix::Fd fd_;
  std::uint64_t slab_bytes_ = 0;
  std::uint32_t slabs_ = 0;
  bool ours_ = false;
};

}  // namespace ucm::slab
