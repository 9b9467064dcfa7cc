#include "slab/segment.h"

#include <fcntl.h>
#include <openssl/sha.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>

#include "cache/owner_word.h"
#include "cache/process.h"
#include "ucm/posix.h"

namespace ucm::slab {
namespace {

using namespace std::chrono_literals;

/// A creator preallocates and scans files while others wait for it.
constexpr auto kAttachPatience = 600s;
constexpr auto kAttachPoll = 2ms;
constexpr int kAttachRounds = 100;

[[noreturn]] void fail(const std::string& what, int error) {
  throw PosixSetupError("posix_layout slab: " + what + ": " + posix::errno_text(error), error);
}

std::string gib(std::uint64_t bytes) {
  char text[48];
  std::snprintf(text, sizeof text, "%.3f GiB", static_cast<double>(bytes) / (1u << 30));
  return text;
}

/// Equal for the processes that use the same directories under the same namespace name.
std::string segment_path(posix::Core& core) {
  std::string text = core.options.namespace_dir + "/";
  for (const auto& root : core.roots) {
    const BlockId& id = root->id();
    text.append(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
  }
  std::uint8_t digest[32];
  ::SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  std::string name;
  for (int i = 0; i < 12; ++i) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", digest[i]);
    name += hex;
  }
  return core.options.shm_directory + "/ucm-slab-" + std::to_string(::getuid()) + "-" + name;
}

/// The segments this process has open. Opening and closing happen with the mutex held: closing any
/// descriptor of a file would drop the locks that another object holds on it.
struct Registry {
  std::mutex mu;
  struct Entry {
    Segment* segment;
    std::size_t users;
    pid_t pid;
  };
  std::map<std::string, Entry> open;
};
Registry& registry() noexcept {
  static Registry* const r = new Registry;  // segments may outlive static destruction
  return *r;
}

void release(Segment* segment) noexcept {
  if (::getpid() != segment->pid()) return;  // forked: not our locks, not our mapping
  Registry& r = registry();
  const std::lock_guard lock(r.mu);
  const auto it = r.open.find(segment->path());
  if (it == r.open.end() || it->second.segment != segment) return;
  if (--it->second.users > 0) return;
  r.open.erase(it);
  delete segment;
}

void wait_for_attach_lock(const cache::FileLocks& locks, const std::string& path) {
  const auto give_up = std::chrono::steady_clock::now() + kAttachPatience;
  while (!locks.try_lock_attach()) {
    if (std::chrono::steady_clock::now() >= give_up) {
      throw PosixSetupError("posix_layout slab: another process has been setting up " + path +
                                " for " + std::to_string(kAttachPatience.count()) +
                                " s; end it and start again",
                            ETIMEDOUT);
    }
    std::this_thread::sleep_for(kAttachPoll);
  }
}

bool is_current(int fd, const std::string& path) noexcept {
  struct stat a {
  }, b{};
  return ::fstat(fd, &a) == 0 && ::stat(path.c_str(), &b) == 0 && a.st_ino == b.st_ino &&
         a.st_dev == b.st_dev;
}

/// Size and number of the files of a root with that budget.
struct Plan {
  std::uint64_t slab_bytes = 0;
  std::uint32_t slabs = 0;  // per root
};

Plan plan_for(std::uint64_t capacity, std::size_t roots, std::uint64_t slot,
              std::size_t layout_bytes) {
  constexpr std::uint64_t kMinSlab = 16u << 20;
  constexpr std::uint64_t kMaxSlabs = 64;  // per root: descriptors, and classes that share them
  const std::uint64_t budget = capacity / roots;
  const std::uint64_t least = SlabShape::bytes_for(slot, layout_bytes, 1);
  std::uint64_t n =
      std::min(budget / std::max(kMinSlab, SlabShape::bytes_for(slot, layout_bytes, 8)), kMaxSlabs);
  if (n < 4) n = std::min<std::uint64_t>(budget / least, 4);
  if (n == 0) {
    throw PosixSetupError("posix_layout slab: posix_capacity_gb is too small: " + gib(capacity) +
                              " over " + std::to_string(roots) + " directories, needed at least " +
                              gib(least * roots) + " for objects of " + gib(slot),
                          0);
  }
  return {budget / n / kPage * kPage, static_cast<std::uint32_t>(n)};
}

}  // namespace

Segment::Segment(std::string path, int fd)
    : path_(std::move(path)), fd_(fd), pid_(::getpid()), locks_(fd) {}

std::shared_ptr<Segment> Segment::open(posix::Core& core) {
  const std::string path = segment_path(core);
  Registry& r = registry();
  const std::lock_guard lock(r.mu);
  const auto it = r.open.find(path);
  if (it != r.open.end() && it->second.pid == ::getpid()) {
    it->second.segment->check(core);
    ++it->second.users;
    return {it->second.segment, release};
  }
  if (it != r.open.end()) r.open.erase(it);  // inherited by fork: the parent's
  auto segment = attach(path, core);
  r.open[path] = {segment.get(), 1, ::getpid()};
  return {segment.release(), release};
}

std::unique_ptr<Segment> Segment::attach(const std::string& path, posix::Core& core) {
  LeftBehind left;
  for (int round = 0; round < kAttachRounds; ++round) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_CREAT, 0600);
    if (fd < 0) fail("cannot open " + path, errno);
    std::unique_ptr<Segment> segment(new Segment(path, fd));  // closes the descriptor
    if (!segment->locks_.supported()) fail("no record locks on " + path, ENOLCK);
    wait_for_attach_lock(segment->locks_, path);
    segment->attach_locked_ = true;
    if (!is_current(fd, path)) continue;
    std::byte head_bytes[64];
    const ssize_t got = ::pread(fd, head_bytes, sizeof head_bytes, 0);
    const bool alive = segment->locks_.any_held_elsewhere();
    if (!alive && got > 0) {
      left = left_behind(fd);
      ::unlink(path.c_str());  // all who used it are gone: the files tell what there is
      continue;
    }
    segment->open_leases(core);
    if (!alive) {
      segment->create(core, left);
    } else {
      std::uint32_t version = 0;
      std::uint64_t bytes = 0;
      if (got < static_cast<ssize_t>(sizeof head_bytes) ||
          std::memcmp(head_bytes, kSegmentMagic, sizeof kSegmentMagic) != 0) {
        fail(path + " is in use and is not an index of slab files; remove it", EBADMSG);
      }
      std::memcpy(&version, head_bytes + offsetof(Header, version), sizeof version);
      if (version != kSegmentVersion) {
        throw PosixSetupError("posix_layout slab: " + path + " has layout version " +
                                  std::to_string(version) + ", this build has " +
                                  std::to_string(kSegmentVersion) +
                                  "; stop the processes that use it, or run the same release",
                              0);
      }
      std::memcpy(&bytes, head_bytes + offsetof(Header, segment_bytes), sizeof bytes);
      segment->map(bytes);
      segment->place_tables();
      segment->check(core);
      for (auto& lease : segment->leases_) lease->join();
      std::vector<std::uint32_t> counts;
      for (std::uint32_t i = 0; i < segment->header_->roots; ++i) {
        counts.push_back(segment->header_->root[i].extents);
      }
      segment->open_files(core, std::move(counts), segment->header_->slab_bytes);
    }
    segment->take_record();
    segment->locks_.unlock_attach();
    segment->attach_locked_ = false;
    return segment;
  }
  throw PosixSetupError("posix_layout slab: " + path + " kept vanishing while it was being opened",
                        EAGAIN);
}

void Segment::open_leases(posix::Core& core) {
  for (const auto& root : core.roots) {
    leases_.push_back(std::make_unique<Lease>(root->full_path(""), core.options.lease_ttl));
  }
}

void Segment::open_files(posix::Core& core, std::vector<std::uint32_t> counts,
                         std::uint64_t slab_bytes) {
  std::vector<std::string> paths;
  for (const auto& root : core.roots) paths.push_back(root->full_path(""));
  files_ = std::make_unique<Files>(std::move(paths), std::move(counts), slab_bytes);
}

void Segment::create(posix::Core& core, const LeftBehind& left) {
  const std::uint64_t capacity = core.options.gc.capacity_bytes;
  const std::uint64_t slot = core.format.file_bytes();
  const std::size_t layout_bytes = core.format.geometry().layout.size();
  const std::size_t roots = core.roots.size();
  const auto undo = [this] {
    for (auto& lease : leases_) lease->release();
    ::unlink(path_.c_str());
  };
  try {
    for (auto& lease : leases_) lease->take();
    Plan plan = plan_for(capacity, roots, slot, layout_bytes);
    for (const auto& lease : leases_) {
      if (lease->slab_bytes() == 0) continue;
      plan.slab_bytes = lease->slab_bytes();
      break;
    }
    for (std::size_t i = 0; i < roots; ++i) {
      if (leases_[i]->slab_bytes() == 0 || leases_[i]->slab_bytes() == plan.slab_bytes) continue;
      throw PosixSetupError(
          "posix_layout slab: " + core.roots[i]->full_path("") + " has files of " +
              std::to_string(leases_[i]->slab_bytes()) + " bytes, another directory has files of " +
              std::to_string(plan.slab_bytes) + "; do not mix directories of different deployments",
          0);
    }
    plan.slabs = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(capacity / roots / plan.slab_bytes, 4096));
    const SlabShape own = SlabShape::fit(plan.slab_bytes, slot, layout_bytes, kNone, kNone);
    if (plan.slabs == 0 || own.slots == 0) {
      throw PosixSetupError(
          "posix_layout slab: the directory has files of " + gib(plan.slab_bytes) +
              ", configured are objects of " + gib(slot) + " and posix_capacity_gb of " +
              gib(capacity) + " over " + std::to_string(roots) +
              " directories: at least one file per directory and one object per file must fit; "
              "raise posix_capacity_gb, or remove the directory's slab files and " +
              std::string(posix::kSlabManifest),
          0);
    }
    open_files(core, std::vector<std::uint32_t>(roots, plan.slabs), plan.slab_bytes);
    files_->prepare();

    // Room for classes of smaller objects; what is below that uses part of a file only.
    const std::uint64_t smallest = std::min(slot, std::max<std::uint64_t>(slot / 4, 16u << 10));
    const auto extents = static_cast<std::uint32_t>(roots * plan.slabs);
    const std::uint64_t slot_stride = plan.slab_bytes / smallest + 1;
    const std::uint64_t group_stride =
        std::max(slot_stride / kMaxGroupSlots + 1, plan.slab_bytes / (8u << 20) + 2);
    const std::uint64_t slots = slot_stride * extents;
    const std::uint64_t buckets =
        std::bit_ceil(std::max<std::uint64_t>(std::uint64_t{own.slots} * extents, 64));
    const std::uint64_t bytes =
        align_up(sizeof(Header), kPage) + align_up(sizeof(ExtentRecord) * extents, kPage) +
        align_up(sizeof(Group) * group_stride * extents, kPage) +
        align_up(sizeof(Bucket) * buckets, kPage) + align_up(sizeof(SlotMeta) * slots, kPage);
    if (slots >= kNone) fail("more than 2^32 slots; use larger objects", EOVERFLOW);
    if (const int rc = ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes)); rc != 0) {
      fail("the index needs " + std::to_string(bytes >> 10) + " KiB in " +
               core.options.shm_directory +
               (rc == EFBIG ? ", more than a file of this process may have (ulimit -f)"
                            : ", which has not that much free (docker: --shm-size)"),
           rc);
    }
    map(bytes);
    Header& h = *header_;
    std::memcpy(h.magic, kSegmentMagic, sizeof kSegmentMagic);
    h.version = kSegmentVersion;
    h.segment_bytes = bytes;
    h.slab_bytes = plan.slab_bytes;
    h.capacity_bytes = capacity;
    h.extents = extents;
    h.slot_stride = static_cast<std::uint32_t>(slot_stride);
    h.group_stride = static_cast<std::uint32_t>(group_stride);
    h.buckets = static_cast<std::uint32_t>(buckets);
    h.roots = static_cast<std::uint32_t>(roots);
    h.creator_pid = static_cast<std::uint32_t>(pid_);
    h.creator_start_time = cache::own_start_time();
    const auto boot = cache::boot_id();
    std::copy(boot.begin(), boot.end(), h.boot_id);
    const auto& digest = core.format.namespace_digest();
    std::copy(digest.begin(), digest.end(), h.namespace_digest);
    for (std::uint32_t i = 0; i < roots; ++i) {
      h.root[i] = {core.roots[i]->id(), i * plan.slabs, plan.slabs};
    }
    place_tables();
    for (std::uint32_t e = 0; e < extents; ++e) extents_[e].root = e / plan.slabs;
    for (std::uint32_t b = 0; b < h.buckets; ++b) buckets_[b].head.store(kNone);
    scan_files(*this, core);
    close_left_behind(*this, left, core.options.quarantine);
    for (auto& lease : leases_) lease->share(plan.slab_bytes, plan.slabs);
    h.state.store(static_cast<std::uint32_t>(SegmentState::kLive), std::memory_order_release);
    created_ = true;
  } catch (...) {
    undo();
    throw;
  }
}

void Segment::check(posix::Core& core) const {
  const Header& h = *header_;
  const auto& digest = core.format.namespace_digest();
  if (!std::equal(digest.begin(), digest.end(), h.namespace_digest)) {
    throw PosixSetupError("posix_layout slab: the directory " + core.roots[0]->full_path("") +
                              " is in use for another namespace",
                          0);
  }
  if (core.options.gc.capacity_bytes != h.capacity_bytes) {
    throw PosixSetupError("posix_layout slab: " + core.roots[0]->full_path("") +
                              " is in use with posix_capacity_gb " + gib(h.capacity_bytes) +
                              ", this process is configured with " +
                              gib(core.options.gc.capacity_bytes) +
                              "; give all processes of the node the same",
                          0);
  }
}

void Segment::map(std::uint64_t bytes) {
  void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (p == MAP_FAILED) fail("mmap of " + path_, errno);
  // A forked child must not run on it: it has no record, so nobody would see it die.
  (void)::madvise(p, bytes, MADV_DONTFORK);
  header_ = static_cast<Header*>(p);
  mapped_ = bytes;
}

void Segment::place_tables() noexcept {
  const Header& h = *header_;
  auto* at = reinterpret_cast<std::byte*>(header_) + align_up(sizeof(Header), kPage);
  extents_ = reinterpret_cast<ExtentRecord*>(at);
  at += align_up(sizeof(ExtentRecord) * h.extents, kPage);
  groups_ = reinterpret_cast<Group*>(at);
  at += align_up(sizeof(Group) * h.group_stride * h.extents, kPage);
  buckets_ = reinterpret_cast<Bucket*>(at);
  at += align_up(sizeof(Bucket) * h.buckets, kPage);
  metas_ = reinterpret_cast<SlotMeta*>(at);
  mask_ = h.buckets - 1;
}

void Segment::take_record() {
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    ProcessRecord& r = header_->process[p];
    // A used record whose process died is cleaned up before anybody may have it.
    if (r.used.load(std::memory_order_acquire) != 0 || !locks_.try_lock(p)) continue;
    r.pid = static_cast<std::uint32_t>(pid_);
    r.start_time = cache::own_start_time();
    r.used.store(1, std::memory_order_release);
    self_ = p;
    break;
  }
  if (self_ == kNone) {
    fail(path_ + " has " + std::to_string(kMaxProcesses) +
             " processes already, the most it can have",
         EMFILE);
  }
  local_pins_bytes_ = std::uint64_t{slot_limit()} * sizeof(std::uint32_t);
  void* const pins = ::mmap(nullptr, local_pins_bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pins == MAP_FAILED) fail("mmap", errno);
  local_pins_ = static_cast<std::uint32_t*>(pins);
}

std::uint32_t Segment::join_class(const posix::Format& format) {
  const std::lock_guard lock(registry().mu);
  wait_for_attach_lock(locks_, path_);
  struct Unlock {
    const cache::FileLocks& locks;
    ~Unlock() { locks.unlock_attach(); }
  } const unlock{locks_};
  const Geometry& g = format.geometry();
  for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
    ClassRecord& record = header_->geometry[c];
    if (record.used.load(std::memory_order_acquire) != 0) {
      if (record.shard_count == g.shard_count && record.shard_bytes == g.shard_bytes &&
          record.layout_hash == format.layout_hash() && record.layout_bytes == g.layout.size()) {
        return c;
      }
      continue;
    }
    const SlabShape shape =
        SlabShape::fit(header_->slab_bytes, format.file_bytes(), g.layout.size(),
                       header_->slot_stride, header_->group_stride);
    if (shape.slots == 0) {
      throw PosixSetupError(
          "posix_layout slab: objects of " + gib(format.file_bytes()) +
              " do not fit the files of " + gib(header_->slab_bytes) + " in " + files_->path(0, 0) +
              " (their size was chosen at the first start); raise "
              "posix_capacity_gb and remove the slab files, or use another directory",
          0);
    }
    record.shard_count = g.shard_count;
    record.shard_bytes = g.shard_bytes;
    record.layout_hash = format.layout_hash();
    record.shape = shape;
    record.layout_bytes = static_cast<std::uint32_t>(g.layout.size());
    if (g.layout.size() <= kMaxLayoutText) {
      std::memcpy(record.layout, g.layout.data(), g.layout.size());
    }
    record.used.store(1, std::memory_order_release);
    return c;
  }
  throw PosixSetupError("posix_layout slab: " + path_ + " has " + std::to_string(kMaxClasses) +
                            " geometries already, the most it can have; use another namespace",
                        0);
}

bool Segment::alive(std::uint32_t process) const noexcept {
  if (process == self_) return true;
  if (process >= kMaxProcesses ||
      header_->process[process].used.load(std::memory_order_acquire) == 0) {
    return false;
  }
  return locks_.held_elsewhere(process);
}

bool Segment::lock(Shared<std::uint32_t>& word) noexcept {
  return cache::owner_word::lock(word, self_, [this](std::uint32_t owner) noexcept {
    if (!alive(owner)) break_locks(owner);
  });
}

void Segment::unlock(Shared<std::uint32_t>& word) noexcept { cache::owner_word::unlock(word); }

void Segment::break_locks(std::uint32_t dead) noexcept {
  for (std::uint32_t i = 0; i < header_->buckets; ++i) {
    cache::owner_word::break_lock(buckets_[i].lock, dead);
  }
}

bool Segment::begin_recovery(std::uint32_t process) noexcept {
  if (process == self_ || process >= kMaxProcesses) return false;
  recovery_mu_.lock();  // record locks do not exclude threads of one process
  if (header_->process[process].used.load(std::memory_order_acquire) != 0 &&
      locks_.try_lock(process)) {
    return true;
  }
  recovery_mu_.unlock();
  return false;
}

void Segment::end_recovery(std::uint32_t process, bool done) noexcept {
  if (done) header_->process[process].used.store(0, std::memory_order_release);
  locks_.unlock(process);
  recovery_mu_.unlock();
}

void Segment::leave() noexcept {
  const auto give_up = std::chrono::steady_clock::now() + 5s;
  while (!attach_locked_ && !(attach_locked_ = locks_.try_lock_attach())) {
    if (std::chrono::steady_clock::now() >= give_up) return;  // the next attach finds us gone
    std::this_thread::sleep_for(kAttachPoll);
  }
  // With I/O that never came back the record is left to those who recover it.
  if (held.load() == 0) header_->process[self_].used.store(0, std::memory_order_release);
  bool others = false;
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    others = others || (p != self_ && header_->process[p].used.load() != 0 && alive(p));
  }
  if (others) return;
  for (auto& lease : leases_) lease->release();
  ::unlink(path_.c_str());
}

Segment::~Segment() {
  if (::getpid() != pid_) return;  // forked
  if (self_ != kNone) leave();
  if (local_pins_ != nullptr) ::munmap(local_pins_, local_pins_bytes_);
  if (header_ != nullptr) ::munmap(static_cast<void*>(header_), mapped_);
  ::close(fd_);  // and with it every lock that is left
}

}  // namespace ucm::slab
