#include "slab/lease.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <map>
#include <sstream>

#include "cache/layout.h"
#include "posix/counters.h"
#include "posix/names.h"
#include "ucm/posix.h"

namespace ucm::slab {
namespace {

constexpr char kHead[] = "ucm-slab 1\n";

std::string first_line(const char* path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

bool set_lock(int fd, short type) noexcept {
  struct flock f {};
  f.l_type = type;
  f.l_whence = SEEK_SET;
  f.l_start = cache::kLockBase;
  f.l_len = 1;
  int rc;
  do {
    rc = ::fcntl(fd, F_SETLK, &f);
  } while (rc != 0 && errno == EINTR);
  return rc == 0;
}

std::map<std::string, std::string> parse(const std::string& text) {
  std::map<std::string, std::string> out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto space = line.find(' ');
    if (space != std::string::npos) out[line.substr(0, space)] = line.substr(space + 1);
  }
  return out;
}

}  // namespace

HostName HostName::of_this_host() {
  HostName h;
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) == 0) h.host = name;
  h.machine = first_line("/etc/machine-id");
  h.boot = first_line("/proc/sys/kernel/random/boot_id");
  return h;
}

Lease::Lease(std::string ns_path, std::chrono::milliseconds ttl)
    : path_(ns_path + std::string(posix::kSlabManifest)),
      ns_path_(std::move(ns_path)),
      ttl_(ttl),
      me_(HostName::of_this_host()),
      fd_(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)) {
  if (!fd_) refuse("cannot open it", errno);
}

void Lease::refuse(const std::string& why, int error) const {
  throw PosixSetupError(
      "posix_layout slab: " + path_ + ": " + why +
          (error != 0 ? ": " + posix::errno_text(error) : std::string()) +
          "; slab is for the local disk of one node: use posix_layout file for shared directories",
      error);
}

int Lease::read(std::string& text) const noexcept {
  char buffer[1024];
  const ssize_t n = ::pread(fd_.get(), buffer, sizeof buffer, 0);
  if (n < 0) return errno;
  try {
    text.assign(buffer, static_cast<std::size_t>(n));
  } catch (...) {
    return ENOMEM;
  }
  return 0;
}

std::chrono::milliseconds Lease::age() const {
  // By the clock of the file system: hosts may disagree about the time.
  const std::string probe =
      ns_path_ + std::string(posix::kTempPrefix) + "clock-" + std::to_string(::getpid());
  struct stat beat {
  }, now{};
  if (::fstat(fd_.get(), &beat) < 0) refuse("cannot examine it", errno);
  const posix::Fd fd(::open(probe.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const bool ok = fd && ::fstat(fd.get(), &now) == 0;
  const int error = errno;
  ::unlink(probe.c_str());
  if (!ok) refuse("cannot tell the time of the file system", error);
  const auto ms = [](const timespec& t) { return t.tv_sec * 1000 + t.tv_nsec / 1'000'000; };
  return std::chrono::milliseconds(ms(now.st_mtim) - ms(beat.st_mtim));
}

void Lease::take() {
  std::string text;
  if (const int error = read(text); error != 0) refuse("cannot read it", error);
  auto fields = parse(text);
  if (!text.empty() && text.rfind(kHead, 0) != 0) refuse("it is not ours or damaged", EBADMSG);
  if (!set_lock(fd_.get(), F_WRLCK)) {
    refuse("processes of this host (" + fields["host"] + ", first pid " + fields["pid"] +
               ") use the directory without sharing our index (this host is " + me_.host +
               ", pid " + std::to_string(::getpid()) +
               "): give them the same /dev/shm and the same storage_backends",
           EBUSY);
  }
  if (read(text) == 0) fields = parse(text);
  slab_bytes_ = std::strtoull(fields["slab_bytes"].c_str(), nullptr, 10);
  const bool rebooted =
      !me_.machine.empty() && fields["machine"] == me_.machine && fields["host"] == me_.host;
  const bool used = fields["state"] == "used";
  if (used && fields["boot"] != me_.boot && !rebooted && age() < ttl_) {
    (void)set_lock(fd_.get(), F_UNLCK);
    refuse("host " + fields["host"] + " (boot " + fields["boot"] +
               ") uses the directory, this is " + me_.host + " (boot " + me_.boot + ")",
           EBUSY);
  }
  if (const int error = write(true); error != 0) refuse("cannot write it", error);
  ours_ = true;
}

void Lease::share(std::uint64_t slab_bytes, std::uint32_t slabs) {
  slab_bytes_ = slab_bytes;
  slabs_ = slabs;
  if (const int error = write(true); error != 0) refuse("cannot write it", error);
  if (!set_lock(fd_.get(), F_RDLCK)) refuse("cannot lock it", errno);
}

void Lease::join() {
  std::string text;
  if (!set_lock(fd_.get(), F_RDLCK)) refuse("cannot lock it", errno);
  if (const int error = read(text); error != 0) refuse("cannot read it", error);
  auto fields = parse(text);
  slab_bytes_ = std::strtoull(fields["slab_bytes"].c_str(), nullptr, 10);
  slabs_ = static_cast<std::uint32_t>(std::strtoul(fields["slabs"].c_str(), nullptr, 10));
  ours_ = true;
}

int Lease::write(bool in_use) noexcept {
  try {
    std::string text = std::string(kHead) + "slab_bytes " + std::to_string(slab_bytes_) +
                       "\nslabs " + std::to_string(slabs_) + "\nstate " +
                       (in_use ? "used" : "free") + "\nhost " + me_.host + "\nmachine " +
                       me_.machine + "\nboot " + me_.boot + "\npid " + std::to_string(::getpid()) +
                       "\n";
    // One block, written over: a reader sees the old text or the new one.
    text.resize(512, '\n');
    const ssize_t n = ::pwrite(fd_.get(), text.data(), text.size(), 0);
    return n == static_cast<ssize_t>(text.size()) ? 0 : n < 0 ? errno : ENOSPC;
  } catch (...) {
    return ENOMEM;
  }
}

bool Lease::beat() noexcept {
  std::string text;
  if (read(text) != 0) return true;  // the medium fails: that is told elsewhere
  try {
    auto fields = parse(text);
    if (!text.empty() && fields["boot"] != me_.boot) return false;
  } catch (...) {
    return true;
  }
  (void)::futimens(fd_.get(), nullptr);
  return true;
}

void Lease::release() noexcept {
  if (ours_) (void)write(false);
  ours_ = false;
}

}  // namespace ucm::slab
