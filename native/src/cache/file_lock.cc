#include "cache/file_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "cache/layout.h"

namespace ucm::cache {
namespace {

constexpr off_t kAttachByte = kLockBase;
constexpr off_t kFirstRecord = kLockBase + 1;

struct flock range(short type, off_t start, off_t length) noexcept {
  struct flock f {};
  f.l_type = type;
  f.l_whence = SEEK_SET;
  f.l_start = start;
  f.l_len = length;
  return f;
}

bool set(int fd, short type, off_t start) noexcept {
  struct flock f = range(type, start, 1);
  int rc;
  do {
    rc = ::fcntl(fd, F_SETLK, &f);
  } while (rc != 0 && errno == EINTR);
  return rc == 0;
}

/// Errors count as "held": taking a live process for dead corrupts, the reverse only waits.
bool held(int fd, off_t start, off_t length) noexcept {
  struct flock f = range(F_WRLCK, start, length);
  return ::fcntl(fd, F_GETLK, &f) != 0 || f.l_type != F_UNLCK;
}

}  // namespace

bool FileLocks::try_lock(std::uint32_t index) const noexcept {
  return set(fd_, F_WRLCK, kFirstRecord + index);
}

void FileLocks::unlock(std::uint32_t index) const noexcept {
  (void)set(fd_, F_UNLCK, kFirstRecord + index);
}

bool FileLocks::held_elsewhere(std::uint32_t index) const noexcept {
  return held(fd_, kFirstRecord + index, 1);
}

bool FileLocks::try_lock_attach() const noexcept { return set(fd_, F_WRLCK, kAttachByte); }

void FileLocks::unlock_attach() const noexcept { (void)set(fd_, F_UNLCK, kAttachByte); }

bool FileLocks::any_held_elsewhere() const noexcept { return held(fd_, kFirstRecord, 0); }

bool FileLocks::supported() const noexcept {
  struct flock f = range(F_WRLCK, kAttachByte, 1);
  return ::fcntl(fd_, F_GETLK, &f) == 0;
}

}  // namespace ucm::cache
