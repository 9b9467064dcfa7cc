#include "posix/lease.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <sstream>

#include "chaos/hooks.h"
#include "posix/fd.h"

namespace ucm::posix {
namespace {

constexpr char kLeaseFile[] = ".ucm-gc";
constexpr char kHead[] = "ucm-gc 1";

std::int64_t millis(const timespec& t) noexcept {
  return static_cast<std::int64_t>(t.tv_sec) * 1000 + t.tv_nsec / 1'000'000;
}

}  // namespace

std::string settings_text(const PosixGcOptions& o) {
  char text[192];
  std::snprintf(
      text, sizeof text,
      "capacity_bytes=%llu;trigger=%.4f;recycle=%.4f;candidate_extra=%.4f;interval_ms=%lld",
      static_cast<unsigned long long>(o.capacity_bytes), o.trigger, o.recycle, o.candidate_extra,
      static_cast<long long>(o.interval.count()));
  return text;
}

Lease::Lease(std::string root_path, const PosixGcOptions& options, const Identity& me,
             std::function<int(int)> is_root)
    : root_path_(std::move(root_path)),
      options_(options),
      settings_(settings_text(options)),
      me_(me),
      is_root_(std::move(is_root)) {}

std::string Lease::encode() const {
  std::ostringstream out;
  out << kHead << "\nowner " << me_.label << "\nboot " << me_.boot << "\npid_space "
      << me_.pid_space << "\npid " << me_.pid << "\nstart_ticks " << me_.start_ticks << "\nttl_ms "
      << options_.lease_ttl.count() << "\nsettings " << settings_ << "\n";
  return out.str();
}

bool Lease::decode(const std::string& text, Content& out) {
  std::istringstream in(text);
  std::string line;
  if (!std::getline(in, line) || line != kHead) return false;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string key;
    fields >> key;
    if (key == "owner") fields >> out.owner;
    if (key == "boot") fields >> out.boot;
    if (key == "pid_space") fields >> out.pid_space;
    if (key == "pid") fields >> out.pid;
    if (key == "start_ticks") fields >> out.start_ticks;
    if (key == "ttl_ms") fields >> out.ttl_ms;
    if (key == "settings") fields >> out.settings;
  }
  return !out.owner.empty() && !out.settings.empty();
}

int Lease::read(int root_fd, Content& content, timespec& beat) const {
  const Fd fd(openat(root_fd, kLeaseFile, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return errno;
  struct stat st {};
  char text[2048];
  const ssize_t n = pread(fd.get(), text, sizeof text, 0);
  if (n < 0 || fstat(fd.get(), &st) < 0) return errno;
  beat = st.st_mtim;
  return decode(std::string(text, static_cast<std::size_t>(n)), content) ? 0 : EBADMSG;
}

bool Lease::alive(const Content& c, const timespec& beat) const noexcept {
  if (c.boot == me_.boot && c.pid_space != 0 && c.pid_space == me_.pid_space &&
      process_start_ticks(c.pid) != c.start_ticks) {
    return false;  // its process is gone (or its pid is somebody else's now)
  }
  // A heartbeat far in the future is from before the clock was set back: its holder, if it lives, has
  // beaten since. Or nobody could ever replace a dead one of another host.
  const auto ttl = static_cast<std::int64_t>(c.ttl_ms);
  const std::int64_t age = millis(medium_now_) - millis(beat);
  return age <= ttl && age >= -ttl;
}

int Lease::publish(int root_fd, bool replace) {
  const std::string temp = std::string(kTempPrefix) + me_.label + "-gc";
  {
    const Fd fd(
        openat(root_fd, temp.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd) return errno;
    const std::string text = encode();
    const ssize_t n = pwrite(fd.get(), text.data(), text.size(), 0);
    struct stat st {};
    if (n != static_cast<ssize_t>(text.size()) || fstat(fd.get(), &st) < 0) {
      const int error = n < 0 ? errno : ENOSPC;
      (void)unlinkat(root_fd, temp.c_str(), 0);
      return error;
    }
    medium_now_ = st.st_mtim;
  }
  UCM_CHAOS_POINT(kLeaseWritten);
  int error = 0;
  if (!replace) {
    // link() fails when the name exists: of several that start at once exactly one wins.
    error = linkat(root_fd, temp.c_str(), root_fd, kLeaseFile, 0) < 0 ? errno : 0;
    if (error == EPERM || error == EOPNOTSUPP || error == ENOSYS) replace = true;
  }
  if (replace) error = renameat(root_fd, temp.c_str(), root_fd, kLeaseFile) < 0 ? errno : 0;
  (void)unlinkat(root_fd, temp.c_str(), 0);
  return error;
}

Lease::Held Lease::hold() noexcept {
  try {
    const Fd root(open(root_path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!root) {
      error_ = errno;
      return Held::kError;
    }
    error_ = is_root_ ? is_root_(root.get()) : 0;
    if (error_ != 0) return Held::kError;
    Content content;
    timespec beat{};
    error_ = read(root.get(), content, beat);
    if (error_ == 0 && content.owner == me_.label) {
      // Heartbeat; the time it leaves is the medium's own clock.
      const timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
      struct stat st {};
      if (utimensat(root.get(), kLeaseFile, times, AT_SYMLINK_NOFOLLOW) < 0 ||
          fstatat(root.get(), kLeaseFile, &st, AT_SYMLINK_NOFOLLOW) < 0) {
        error_ = errno;
        return Held::kError;
      }
      medium_now_ = st.st_mtim;
      return Held::kYes;
    }
    if (error_ == ENOENT) {
      error_ = publish(root.get(), false);
      if (error_ == 0) return Held::kYes;
      if (error_ != EEXIST) return Held::kError;
      error_ = read(root.get(), content, beat);
    } else if (error_ == 0 || error_ == EBADMSG) {
      // Somebody else's, or damaged. What time is it over there? Our own file tells.
      const std::string temp = std::string(kTempPrefix) + me_.label + "-clock";
      const Fd clock(openat(root.get(), temp.c_str(),
                            O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
      struct stat st {};
      const bool told = clock && fstat(clock.get(), &st) == 0;
      const int why = errno;
      (void)unlinkat(root.get(), temp.c_str(), 0);
      if (!told) {
        error_ = why;
        return Held::kError;
      }
      medium_now_ = st.st_mtim;
    }
    if (error_ == 0 && alive(content, beat)) {
      if (content.settings == settings_) return Held::kNo;
      other_ = content.settings + " (held by " + content.owner + ")";
      return Held::kConflict;
    }
    if (error_ != 0 && error_ != EBADMSG) return Held::kError;
    error_ = publish(root.get(), true);
    if (error_ != 0) return Held::kError;
    // Another one may have replaced it at the same moment: the file says who was last.
    error_ = read(root.get(), content, beat);
    return error_ == 0 && content.owner == me_.label ? Held::kYes : Held::kNo;
  } catch (...) {
    error_ = ENOMEM;
    return Held::kError;
  }
}

void Lease::release() noexcept {
  try {
    const Fd root(open(root_path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    Content content;
    timespec beat{};
    if (root && read(root.get(), content, beat) == 0 && content.owner == me_.label) {
      (void)unlinkat(root.get(), kLeaseFile, 0);
    }
  } catch (...) {
    // The lease then ends by its heartbeat.
  }
}

}  // namespace ucm::posix
