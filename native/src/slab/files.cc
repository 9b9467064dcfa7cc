#include "slab/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "posix/counters.h"
#include "posix/fd.h"
#include "ucm/posix.h"

namespace ucm::slab {
namespace {

constexpr char kPrefix[] = "slab-";

std::string gib(std::uint64_t bytes) {
  char text[48];
  std::snprintf(text, sizeof text, "%.3f GiB", static_cast<double>(bytes) / (1u << 30));
  return text;
}

/// Number of a slab file by its name, or -1.
long number_of(const char* name) noexcept {
  unsigned n = 0;
  int used = 0;
  if (std::sscanf(name, "slab-%4u%n", &n, &used) != 1 || name[used] != 0) return -1;
  return static_cast<long>(n);
}

}  // namespace

void refuse_file_layout(const std::string& ns_path) {
  DIR* const dir = ::opendir(ns_path.c_str());
  if (dir == nullptr) return;  // prepare() says so
  const auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  std::string other;
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    if (name.size() == 2 && hex(name[0]) && hex(name[1])) other = name;
  }
  ::closedir(dir);
  if (other.empty()) return;
  throw PosixSetupError("posix_layout slab: " + ns_path + " holds the layout file (there is " +
                            other +
                            "/), configured is posix_layout slab; remove it, or name another "
                            "directory or namespace",
                        0);
}

Files::Files(std::vector<std::string> ns_paths, std::vector<std::uint32_t> counts,
             std::uint64_t slab_bytes)
    : ns_paths_(std::move(ns_paths)), counts_(std::move(counts)), slab_bytes_(slab_bytes) {
  for (const std::uint32_t n : counts_) {
    first_.push_back(static_cast<std::uint32_t>(total_));
    total_ += n;
  }
  fds_ = std::make_unique<std::atomic<int>[]>(2 * total_);
  for (std::size_t i = 0; i < 2 * total_; ++i) fds_[i].store(-1);
}

Files::~Files() {
  for (std::size_t i = 0; i < 2 * total_; ++i) {
    if (const int fd = fds_[i].load(); fd >= 0) ::close(fd);
  }
}

std::string Files::path(std::uint32_t root, std::uint32_t number) const {
  char name[24];
  std::snprintf(name, sizeof name, "%s%04u", kPrefix, number);
  return ns_paths_[root] + name;
}

void Files::prepare() {
  std::vector<std::string> made;
  const auto refuse = [&](const std::string& why, int error) {
    for (const auto& path : made) ::unlink(path.c_str());
    throw PosixSetupError("posix_layout slab: " + why, error);
  };
  for (std::uint32_t r = 0; r < counts_.size(); ++r) {
    DIR* const dir = ::opendir(ns_paths_[r].c_str());
    if (dir == nullptr)
      refuse("cannot list " + ns_paths_[r] + ": " + posix::errno_text(errno), errno);
    std::vector<std::string> extra;
    while (const dirent* entry = ::readdir(dir)) {
      const std::string name = entry->d_name;
      if (const long n = number_of(name.c_str()); n >= static_cast<long>(counts_[r])) {
        extra.push_back(ns_paths_[r] + name);
      }
    }
    ::closedir(dir);
    for (const auto& path : extra) ::unlink(path.c_str());
    std::uint64_t needed = 0;
    for (std::uint32_t n = 0; n < counts_[r]; ++n) {
      struct stat st {};
      const bool there = ::stat(path(r, n).c_str(), &st) == 0 && S_ISREG(st.st_mode);
      const std::uint64_t has = there ? static_cast<std::uint64_t>(st.st_blocks) * 512 : 0;
      if (has < slab_bytes_) needed += slab_bytes_ - has;
    }
    struct statvfs space {};
    if (::statvfs(ns_paths_[r].c_str(), &space) < 0) {
      refuse("cannot examine " + ns_paths_[r] + ": " + posix::errno_text(errno), errno);
    }
    const std::uint64_t available = std::uint64_t{space.f_bavail} * space.f_frsize;
    const auto too_small = [&](int error) {
      refuse("not enough space in " + ns_paths_[r] + ": needed " + gib(needed) + ", available " +
                 gib(available) + " (" + std::to_string(needed) + " and " +
                 std::to_string(available) + " bytes); lower posix_capacity_gb or free some space",
             error);
    };
    if (needed > available) too_small(ENOSPC);
    for (std::uint32_t n = 0; n < counts_[r]; ++n) {
      const std::string name = path(r, n);
      struct stat st {};
      const bool there = ::stat(name.c_str(), &st) == 0;
      const posix::Fd fd(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
      if (!fd) refuse("cannot open " + name + ": " + posix::errno_text(errno), errno);
      if (!there) made.push_back(name);
      if (there && static_cast<std::uint64_t>(st.st_size) > slab_bytes_ &&
          ::ftruncate(fd.get(), static_cast<off_t>(slab_bytes_)) < 0) {
        refuse("cannot shorten " + name + ": " + posix::errno_text(errno), errno);
      }
      int rc;
      do {
        rc = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(slab_bytes_)) < 0 ? errno : 0;
      } while (rc == EINTR);
      if (rc == ENOSPC || rc == EDQUOT || rc == EFBIG) too_small(rc);
      if (rc != 0) {
        refuse("cannot preallocate " + name + ": " + posix::errno_text(rc) +
                   "; use a file system that can (ext4, xfs, tmpfs), or posix_layout file",
               rc);
      }
    }
  }
}

int Files::fd(std::uint32_t root, std::uint32_t number, bool direct) noexcept {
  std::atomic<int>& place = at(root, number, direct);
  int fd = place.load(std::memory_order_acquire);
  if (fd >= 0) return fd;
  try {
    fd = ::open(path(root, number).c_str(),
                O_RDWR | O_CLOEXEC | O_NOFOLLOW | (direct ? O_DIRECT : 0));
  } catch (...) {
    return -ENOMEM;
  }
  if (fd < 0) return -errno;
  int none = -1;
  if (place.compare_exchange_strong(none, fd, std::memory_order_acq_rel)) return fd;
  ::close(fd);  // another thread was quicker
  return none;
}

int Files::still_there(std::uint32_t root, std::uint32_t number) noexcept {
  int fd = at(root, number, true).load();
  if (fd < 0) fd = at(root, number, false).load();
  struct stat open {
  }, named{};
  if (fd < 0 || ::fstat(fd, &open) < 0 || open.st_nlink == 0) return ENOENT;
  try {
    if (::stat(path(root, number).c_str(), &named) < 0) return errno;
  } catch (...) {
    return 0;
  }
  return named.st_dev == open.st_dev && named.st_ino == open.st_ino ? 0 : ENOENT;
}

}  // namespace ucm::slab
