#include "posix/root.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "chaos/hooks.h"
#include "ucm/geometry.h"

namespace ucm::posix {
namespace {

constexpr char kIdentityFile[] = ".ucm-root";
constexpr std::string_view kIdentityHead = "ucm-root 1 ";

struct FsName {
  std::uint32_t magic;
  const char* name;
  bool local;
};
constexpr FsName kFileSystems[] = {
    {0xEF53, "ext4", true},      {0x58465342, "xfs", true},     {0x9123683E, "btrfs", true},
    {0x01021994, "tmpfs", true}, {0x794c7630, "overlay", true}, {0xF2F52010, "f2fs", true},
    {0x2fc12fc1, "zfs", true},   {0x858458f6, "ramfs", true},   {0xca451a4e, "bcachefs", true},
    {0x6969, "nfs", false},      {0x65735546, "fuse", false},   {0x0BD00BD0, "lustre", false},
    {0x00c36400, "ceph", false}, {0xFF534D42, "cifs", false},   {0xfe534d42, "smb2", false},
    {0x47504653, "gpfs", false}, {0x01021997, "9p", false},     {0x19830326, "beegfs", false},
};

struct AlignedBuffer {
  explicit AlignedBuffer(std::size_t n)
      : data(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, n))) {}
  ~AlignedBuffer() { std::free(data); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  std::byte* data;
};

int read_identity(int root_fd, BlockId& id) noexcept {
  const Fd fd(openat(root_fd, kIdentityFile, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd) return errno;
  char text[64] = {};
  const ssize_t n = pread(fd.get(), text, sizeof text - 1, 0);
  if (n < 0) return errno;
  const std::string_view line(text, static_cast<std::size_t>(n));
  if (!line.starts_with(kIdentityHead) ||
      !parse_object_name(line.substr(kIdentityHead.size(), 32), id) || id.empty()) {
    return EBADMSG;
  }
  return 0;
}

/// Publishes the identity unless somebody else was quicker (EEXIST).
int write_identity(int root_fd, const BlockId& id, const std::string& label) noexcept {
  const std::string temp = std::string(kTempPrefix) + label + "-root";
  Fd fd(openat(root_fd, temp.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) return errno;
  const std::string text =
      std::string(kIdentityHead) + std::string(ObjectPath(id).file(), 32) + "\n";
  const ssize_t n = pwrite(fd.get(), text.data(), text.size(), 0);
  int error = n == static_cast<ssize_t>(text.size()) ? 0 : n < 0 ? errno : ENOSPC;
  fd.reset();
  UCM_CHAOS_POINT(kRootIdentity);
  if (error == 0 && linkat(root_fd, temp.c_str(), root_fd, kIdentityFile, 0) < 0) {
    error = errno;
    if (error == EPERM || error == EOPNOTSUPP || error == ENOSYS || error == EMLINK) {
      // No hard links here: rename, and let the caller read back who won.
      error = renameat(root_fd, temp.c_str(), root_fd, kIdentityFile) < 0 ? errno : 0;
    }
  }
  (void)unlinkat(root_fd, temp.c_str(), 0);
  return error;
}

bool is_medium_error(Direction d, int error) noexcept {
  switch (error) {
    case EIO:
    case EROFS:
    case ESTALE:
    case ENOTCONN:
    case ENODEV:
    case ENXIO:
    case ETIMEDOUT:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ECONNRESET:
    case EREMOTEIO:
    case EUCLEAN:
    case EACCES:
    case EPERM:
    case ENOTDIR:
      return true;
    case ENOENT:
      return d == Direction::kWrite;
    default:
      return false;
  }
}

}  // namespace

Root::Root(std::string path, const PosixOptions& options, const Identity& me, Counters& counters,
           ErrorRing& errors)
    : path_(std::move(path)),
      ns_name_(options.namespace_dir),
      me_(me),
      counters_(counters),
      errors_(errors),
      faults_(options.faults) {
  std::error_code ec;
  // Private directories, whatever the umask; parents that exist are left as they are.
  std::filesystem::path walked;
  for (const auto& part : std::filesystem::path(path_)) {
    walked /= part;
    if (std::filesystem::exists(walked, ec)) continue;
    if (mkdir(walked.c_str(), 0700) < 0 && errno != EEXIST) {
      refuse("cannot create " + walked.string(), errno, "create it or name another directory");
    }
  }
  const Fd root = open_root();
  if (!root) refuse("cannot open the directory", errno, "check that it is a directory and mounted");
  struct stat st {};
  struct statfs fs {};
  if (fstat(root.get(), &st) < 0 || fstatfs(root.get(), &fs) < 0) {
    refuse("cannot examine the directory", errno, "check the mount");
  }
  device_ = st.st_dev;
  file_system_ = "type 0x" + [&] {
    char hex[20];
    std::snprintf(hex, sizeof hex, "%x", static_cast<unsigned>(fs.f_type));
    return std::string(hex);
  }();
  for (const auto& known : kFileSystems) {
    if (known.magic == static_cast<std::uint32_t>(fs.f_type)) {
      file_system_ = known.name;
      local_ = known.local;
    }
  }
  if (const int error = ensure_identity(root.get(), true); error != 0) {
    refuse("cannot read or write " + path_ + "/" + kIdentityFile, error,
           error == EBADMSG ? "the file is damaged: restore it, or remove it (objects placed by it "
                              "over several roots become unreachable)"
                            : "make the directory writable for this user");
  }
  int error = reopen(true);
  if (error != 0) refuse("cannot create " + ns_name_ + " in it", error, "make it writable");
  const auto ns = ns_dir();
  direct_note_ = "off as configured";
  const char* step = "";
  if (options.direct) {
    error = try_io(ns->get(), true, "-probe", step);
    direct_ = error == 0;
    direct_note_ = direct_ ? "on" : "off, O_DIRECT was refused: " + errno_text(error);
    if (error == EROFS || error == EACCES || error == EPERM || error == ENOSPC || error == EDQUOT) {
      refuse("cannot write a test file", error, "make the directory writable and free some space");
    }
  }
  if (!direct_) {
    error = try_io(ns->get(), false, "-probe", step);
    if (error != 0) {
      refuse("cannot write and read back a test file", error,
             "make the directory writable and free some space");
    }
  }
}

void Root::refuse(const std::string& what, int error, const std::string& advice) const {
  throw PosixSetupError(
      "posix root " + path_ + ": " + what + ": " + errno_text(error) + "; " + advice, error);
}

std::string Root::describe() const {
  return path_ + " (" + file_system_ + ", " + (local_ ? "local" : "network") + ", direct I/O " +
         direct_note_ + ")";
}

std::string Root::full_path(const char* name) const { return path_ + "/" + ns_name_ + "/" + name; }

Fd Root::open_root() const noexcept {
  return Fd(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

std::shared_ptr<const Fd> Root::ns_dir() const {
  std::scoped_lock lock(mutex_);
  return ns_dir_;
}

int Root::check_identity(int root_fd) const noexcept {
  BlockId found;
  const int error = read_identity(root_fd, found);
  if (error != 0) return error == ENOENT ? ESTALE : error;
  return found == id_ ? 0 : ESTALE;
}

int Root::ensure_identity(int root_fd, bool first) noexcept {
  BlockId found;
  int error = read_identity(root_fd, found);
  if (error == ENOENT) {
    if (!first) {
      // Emptied while we run. On the device of set-up somebody recreated the directory: it is ours.
      // On another one the mount is gone, and what we would write lands on the disk below.
      struct stat st {};
      if (fstat(root_fd, &st) < 0) return errno;
      if (st.st_dev != device_) return ESTALE;
    }
    BlockId fresh = id_;
    for (int i = 0; first && fresh.empty() && i < 4; ++i) {
      const Identity seed = Identity::of_this_process();
      if (getentropy(fresh.bytes.data(), fresh.bytes.size()) < 0) {
        std::memcpy(fresh.bytes.data(), seed.label.data() + seed.label.size() - 8, 8);
      }
    }
    error = write_identity(root_fd, fresh, me_.label);
    if (error != 0 && error != EEXIST) return error;
    error = read_identity(root_fd, found);
  }
  if (error != 0) return error;
  if (first) {
    id_ = found;
    return 0;
  }
  return found == id_ ? 0 : ESTALE;  // another root is mounted at this path now
}

int Root::reopen(bool create) noexcept {
  Fd ns;
  const int error = open_namespace(create, ns);
  // No descriptor or memory just now says nothing about the directory: the old handle stays.
  if (error == EMFILE || error == ENFILE || error == ENOMEM) return error;
  std::shared_ptr<const Fd> fresh;
  struct stat st {};
  if (error == 0) {
    if (fstat(ns.get(), &st) < 0) return errno;
    try {
      fresh = std::make_shared<const Fd>(std::move(ns));
    } catch (...) {
      return ENOMEM;
    }
  }
  ns_device_ = st.st_dev;
  ns_inode_ = st.st_ino;
  std::scoped_lock lock(mutex_);
  ns_dir_ = std::move(fresh);
  return error;
}

int Root::open_namespace(bool create, Fd& ns) noexcept {
  const Fd root = open_root();
  if (!root) return errno;
  if (const int error = ensure_identity(root.get(), false); error != 0) return error;
  if (create && mkdirat(root.get(), ns_name_.c_str(), 0700) < 0 && errno != EEXIST) return errno;
  ns = Fd(openat(root.get(), ns_name_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (!ns) return errno;
  if (create) {
    const Fd mark(openat(ns.get(), kNamespaceMark.data(),
                         O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    if (!mark) return errno;
  }
  return 0;
}

bool Root::path_leads_to_handle() const noexcept {
  struct stat st {};
  return stat((path_ + "/" + ns_name_).c_str(), &st) == 0 && st.st_dev == ns_device_ &&
         st.st_ino == ns_inode_;
}

bool Root::revalidate() noexcept {
  const std::unique_lock lock(reopen_mutex_, std::try_to_lock);
  if (!lock) return false;
  const auto now = std::chrono::steady_clock::now();
  if (const auto ns = ns_dir()) {
    struct stat st {};
    if (fstat(ns->get(), &st) == 0 && st.st_nlink > 0) {
      // Alive. It may have been moved away or mounted over: ask the path, but not for every miss.
      if (now - last_path_check_ < std::chrono::seconds(1)) return false;
      last_path_check_ = now;
      if (path_leads_to_handle()) return false;
    }
  } else {
    if (now - last_path_check_ < std::chrono::milliseconds(100)) return false;
    last_path_check_ = now;
  }
  return reopen(false) == 0;
}

int Root::make_dirs(const ObjectPath& object) noexcept {
  const std::scoped_lock lock(reopen_mutex_);
  const char fanout[3] = {object.text[0], object.text[1], 0};
  // The handle may be of a directory that was removed or moved: only the path tells.
  if (!ns_dir() || !path_leads_to_handle()) {
    if (const int error = reopen(true); error != 0) return error;
  }
  const auto ns = ns_dir();
  return mkdirat(ns->get(), fanout, 0700) < 0 && errno != EEXIST ? errno : 0;
}

int Root::try_io(int ns_fd, bool direct, const char* name, const char*& step) const noexcept {
  constexpr std::size_t kBytes = 2 * kIoAlign;
  AlignedBuffer out(kBytes);
  AlignedBuffer in(kBytes);
  if (out.data == nullptr || in.data == nullptr) return ENOMEM;
  std::memset(out.data, 0x5a, kBytes);
  std::memset(in.data, 0, kBytes);
  const std::string temp = std::string(kTempPrefix) + me_.label + name;
  const int flag = direct ? O_DIRECT : 0;
  int error = 0;
  {
    step = "create a test file in";
    const Fd fd(openat(ns_fd, temp.c_str(),
                       O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | flag, 0600));
    if (!fd) {
      error = errno;
    } else if (const ssize_t n = pwrite(fd.get(), out.data, kBytes, 0);
               n != static_cast<ssize_t>(kBytes)) {
      step = "write a test file in";
      error = n < 0 ? errno : ENOSPC;
    }
  }
  if (error == 0) {
    step = "read back a test file in";
    const Fd fd(openat(ns_fd, temp.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | flag));
    if (!fd) {
      error = errno;
    } else if (const ssize_t n = pread(fd.get(), in.data, kBytes, 0);
               n != static_cast<ssize_t>(kBytes)) {
      error = n < 0 ? errno : EIO;
    } else if (std::memcmp(in.data, out.data, kBytes) != 0) {
      error = EIO;
    }
  }
  if (unlinkat(ns_fd, temp.c_str(), 0) < 0 && error == 0) {
    step = "delete a test file in";
    error = errno;
  }
  return error;
}

void Root::note_error(Direction d, int error, const BlockId& id) noexcept {
  if (!is_medium_error(d, error)) return;
  const int i = static_cast<int>(d);
  // One bad file is not a bad medium: repeated failures of the same object count once.
  if (last_failed_[i].exchange(id.word()) == id.word() && streak_[i].load() > 0) return;
  if (streak_[i].fetch_add(1) + 1 >= kFailuresToLeave) {
    take_out(d, error, "several operations in a row failed");
  }
}

void Root::take_out(Direction d, int error, std::string_view why) noexcept {
  int serving = 0;
  if (!out_[static_cast<int>(d)].compare_exchange_strong(serving, error)) return;
  counters_.add(Counter::kRootOutages);
  errors_.add(d == Direction::kRead ? "root out (reads)" : "root out (writes)", path_, error, why);
}

bool Root::probe() noexcept {
  {
    const std::scoped_lock lock(reopen_mutex_);
    if (reopen(true) != 0) return false;
  }
  const auto ns = ns_dir();
  const char* step = "";
  if (!ns || try_io(ns->get(), direct_, "-probe", step) != 0) return false;
  for (int i = 0; i < 2; ++i) {
    streak_[i].store(0);
    out_[i].store(0);
  }
  errors_.add("root back", path_, 0, "it serves again");
  return true;
}

int Root::try_medium(std::string& step) noexcept {
  step = "open";
  Fd ns;
  {
    const std::scoped_lock lock(reopen_mutex_);
    if (const int error = open_namespace(true, ns); error != 0) return error;
  }
  if (faults_) [[unlikely]] {
    for (const IoStep spoilt :
         {IoStep::kOpenWrite, IoStep::kWrite, IoStep::kOpenRead, IoStep::kRead}) {
      std::size_t bytes = 2 * kIoAlign;
      if (const int error = faults_->before(spoilt, path_.c_str(), bytes); error < 0) return -error;
    }
  }
  const char* failed = "";
  const int error = try_io(ns.get(), direct_, "-health", failed);
  if (error != 0) step = failed;
  return error;
}

}  // namespace ucm::posix
