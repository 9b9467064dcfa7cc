#include "cache/segment.h"

#include <fcntl.h>
#include <openssl/sha.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "cache/futex.h"
#include "cache/process.h"
#include "cache/registry.h"
#include "cache/watch.h"
#include "chaos/hooks.h"
#include "memory/huge.h"
#include "memory/populate.h"

namespace ucm::cache {
namespace {

using namespace std::chrono_literals;

/// A creator touches every page of the segment while others wait for it.
constexpr auto kAttachPatience = 600s;
constexpr auto kAttachPoll = 5ms;
/// Bound on "the file vanished while we opened it": each round means that another process finished.
constexpr int kAttachRounds = 100;

[[noreturn]] void fail(const std::string& what, int error) {
  throw CacheError(CacheErrorKind::kSystem, "cache: " + what + ": " + std::strerror(error));
}

std::array<std::uint8_t, 32> digest(const std::string& text) noexcept {
  std::array<std::uint8_t, 32> out{};
  ::SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), out.data());
  return out;
}

/// What may neither run nor be destroyed any more, still reachable for leak checkers.
void keep_for_ever(std::unique_ptr<Watch> watch) noexcept {
  static auto* const kept = new std::vector<std::unique_ptr<Watch>>;
  kept->push_back(std::move(watch));
}

void wait_for_attach_lock(const FileLocks& locks, const std::string& path) {
  const auto give_up = std::chrono::steady_clock::now() + kAttachPatience;
  while (!locks.try_lock_attach()) {
    if (std::chrono::steady_clock::now() >= give_up) {
      throw CacheError(CacheErrorKind::kSystem,
                       "cache: another process has been setting up " + path + " for " +
                           std::to_string(kAttachPatience.count()) + " s; end it and start again");
    }
    std::this_thread::sleep_for(kAttachPoll);
  }
}

/// A header that contradicts itself or its file was damaged: nothing may be mapped by its numbers.
bool sound(const Header& h, int fd) noexcept {
  struct stat s {};
  if (::fstat(fd, &s) != 0 || static_cast<std::uint64_t>(s.st_size) != h.segment_bytes)
    return false;
  const std::uint64_t tables = std::uint64_t{h.extents} * sizeof(std::uint32_t) * (1 + kMaxClasses);
  const std::uint64_t buckets_at = align_up(sizeof(Header) + tables, kPage);
  return h.state.load() == static_cast<std::uint32_t>(SegmentState::kLive) &&
         h.max_processes == kMaxProcesses && h.max_classes == kMaxClasses && h.extents != 0 &&
         std::has_single_bit(h.buckets) &&
         h.controls_offset == align_up(buckets_at + h.buckets * sizeof(Bucket), kPage) &&
         h.control_bytes != 0 && h.control_bytes % kPage == 0 &&
         h.slot_stride == h.control_bytes / control_per_slot(1) + 1 &&
         h.data_offset == align_up(h.controls_offset + std::uint64_t{h.extents} * h.control_bytes,
                                   std::uint64_t{2} << 20) &&
         h.data_offset < h.segment_bytes && (h.segment_bytes - h.data_offset) % h.extents == 0 &&
         (h.segment_bytes - h.data_offset) / h.extents == h.extent_bytes;
}

/// Still the file of that name, not one that was unlinked while we waited?
bool is_current(int fd, const std::string& path) noexcept {
  struct stat a {
  }, b{};
  return ::fstat(fd, &a) == 0 && ::stat(path.c_str(), &b) == 0 && a.st_ino == b.st_ino &&
         a.st_dev == b.st_dev;
}

}  // namespace

Segment::Segment(std::string path, int fd, bool shared)
    : path_(std::move(path)),
      fd_(fd),
      shared_(shared),
      pid_(::getpid()),
      locks_(fd),
      watch_(std::make_unique<Watch>(*this)) {}

std::shared_ptr<Segment> Segment::open(const CacheOptions& options, const Geometry& geometry) {
  std::unique_lock lock(Registry::mutex());
  if (!options.shared) {
    if (options.watcher) return nullptr;  // nobody else can see a private segment
    const int fd = ::memfd_create(options.name.c_str(), MFD_CLOEXEC);
    if (fd < 0) fail("memfd_create", errno);
    std::shared_ptr<Segment> segment(new Segment("memfd:" + options.name, fd, false));
    segment->create(options, geometry);
    segment->take_record(options);
    return segment;
  }
  const std::string path = segment_path(options);
  if (auto known = Registry::find(path, lock)) {
    if (!options.watcher) known->add_data(options);
    return known;
  }
  auto segment = attach(options, geometry);
  if (segment) {
    Registry::add(path, segment);
    segment->registered_ = true;
  }
  return segment;
}

std::shared_ptr<Segment> Segment::attach(const CacheOptions& options, const Geometry& geometry) {
  const std::string path = segment_path(options);
  for (int round = 0; round < kAttachRounds; ++round) {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (options.watcher ? 0 : O_CREAT);
    const int fd = ::open(path.c_str(), flags, 0600);
    if (fd < 0) {
      if (options.watcher && errno == ENOENT) return nullptr;
      fail("cannot open " + path, errno);
    }
    // From here the object closes the descriptor, and with it our locks.
    std::shared_ptr<Segment> segment(new Segment(path, fd, true));
    if (!segment->locks_.supported()) fail("no record locks on " + path, ENOLCK);
    wait_for_attach_lock(segment->locks_, path);
    segment->attach_locked_ = true;
    if (!is_current(fd, path)) continue;

    Header head{};
    const ssize_t got = ::pread(fd, static_cast<void*>(&head), sizeof head, 0);
    const bool alive = segment->locks_.any_held_elsewhere();
    if (got == 0 && !alive) {
      if (options.watcher) {
        ::unlink(path.c_str());  // its creator died at once
        return nullptr;
      }
      segment->create(options, geometry);
    } else if (!alive) {
      // Of whatever version: everybody who used it is gone.
      segment->retire();
      continue;
    } else if (got < 16 || std::memcmp(head.magic, kMagic, sizeof kMagic) != 0) {
      throw CacheError(CacheErrorKind::kMismatch,
                       "cache: " + path + " is in use and is not a cache segment; remove it");
    } else if (head.layout_version != kLayoutVersion) {
      throw CacheError(CacheErrorKind::kMismatch,
                       "cache: " + path + " has layout version " +
                           std::to_string(head.layout_version) + ", this build has " +
                           std::to_string(kLayoutVersion) +
                           "; stop the processes that use it, or run the same release");
    } else if (!sound(head, fd)) {
      throw CacheError(CacheErrorKind::kMismatch,
                       "cache: the header of " + path +
                           " is damaged although processes use it; stop them all and start again");
    } else {
      segment->map_control(head.data_offset);
      if (!segment->other_workers()) {
        if (options.watcher) return nullptr;
        segment->retire();  // only watchers are left: they follow to the new one
        continue;
      }
      segment->check(options);
    }
    segment->take_record(options);
    if (!options.watcher) segment->map_data(options);
    segment->locks_.unlock_attach();
    segment->attach_locked_ = false;
    return segment;
  }
  throw CacheError(CacheErrorKind::kSystem,
                   "cache: " + path + " kept vanishing while it was being opened");
}

void Segment::create(const CacheOptions& options, const Geometry& geometry) {
  const std::uint64_t capacity = options.capacity_bytes != 0
                                     ? options.capacity_bytes
                                     : default_cache_bytes(options.directory, shared_);
  const Plan plan = make_plan(capacity, geometry);
  const std::uint64_t memory = available_memory();
  const std::uint64_t room = shared_ ? std::min(free_space(options.directory), memory) : memory;
  const std::uint64_t minimum = minimum_cache_bytes(options, geometry);
  const auto refuse = [&](const std::string& why) {
    if (shared_) ::unlink(path_.c_str());
    throw CacheError(
        CacheErrorKind::kTooSmall,
        "cache: " + why + ": needed " + human_bytes(std::max(plan.segment_bytes, minimum)) +
            ", available " + human_bytes(room) + " (" + (shared_ ? options.directory : "memory") +
            "), minimum " + human_bytes(minimum) + " for objects of " +
            human_bytes(geometry.object_bytes()) +
            "; set cache_buffer_capacity_gb, or enlarge the memory (docker: --shm-size)");
  };
  if (plan.extents == 0 || plan.segment_bytes < minimum) {
    refuse("a buffer of " + human_bytes(capacity) + " is below the minimum");
  }
  if (plan.segment_bytes > room) refuse("not enough memory");
  // ftruncate would succeed and the first store into a page would kill us: allocate now.
  const int rc = ::posix_fallocate(fd_, 0, static_cast<off_t>(plan.data_offset));
  if (rc != 0) refuse(std::string("posix_fallocate: ") + std::strerror(rc));
  map_control(plan.data_offset);
  const std::uint64_t data_bytes = plan.segment_bytes - plan.data_offset;
  const auto data_at = static_cast<off_t>(plan.data_offset);
  if (::ftruncate(fd_, static_cast<off_t>(plan.segment_bytes)) != 0)
    fail("size of " + path_, errno);
  void* const data = memory::map_shared_aligned(fd_, data_at, data_bytes);
  if (data == MAP_FAILED) fail("mmap of " + path_, errno);
  advise_placement(data, data_bytes);
  (void)memory::back_with_huge_pages(fd_, data_at, data, data_bytes, options.touch_threads);
  const int grown = ::posix_fallocate(fd_, data_at, static_cast<off_t>(data_bytes));
  ::munmap(data, data_bytes);
  if (grown != 0) {
    (void)::ftruncate(fd_, 0);
    refuse(std::string("posix_fallocate: ") + std::strerror(grown));
  }

  Header& h = *header_;
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.layout_version = kLayoutVersion;
  UCM_CHAOS_POINT(kSegmentCreate);
  h.segment_bytes = plan.segment_bytes;
  h.data_offset = plan.data_offset;
  h.extent_bytes = plan.extent_bytes;
  h.extents = plan.extents;
  h.control_bytes = plan.control_bytes;
  h.controls_offset = plan.controls_offset;
  h.buckets = plan.buckets;
  h.max_processes = kMaxProcesses;
  h.max_classes = kMaxClasses;
  h.slot_stride = plan.slot_stride;
  h.capacity_bytes = capacity;
  h.creator_pid = static_cast<std::uint32_t>(pid_);
  h.creator_start_time = own_start_time();
  const auto boot = boot_id();
  std::copy(boot.begin(), boot.end(), h.boot_id);
  std::copy(options.namespace_digest.begin(), options.namespace_digest.end(), h.namespace_digest);
  map_control(plan.data_offset);  // again: the table addresses follow from the header
  for (std::uint32_t i = 0; i < h.buckets; ++i) buckets_[i].head.store(kNone);
  h.extents_free.store(h.extents);
  h.state.store(static_cast<std::uint32_t>(SegmentState::kLive), std::memory_order_release);
  created_ = true;
}

void Segment::check(const CacheOptions& options) const {
  const Header& h = *header_;
  if (!std::equal(std::begin(h.namespace_digest), std::end(h.namespace_digest),
                  options.namespace_digest.begin())) {
    throw CacheError(CacheErrorKind::kMismatch,
                     "cache: " + path_ + " belongs to another namespace");
  }
  if (options.capacity_explicit && !options.watcher && options.capacity_bytes != h.capacity_bytes) {
    throw CacheError(CacheErrorKind::kMismatch,
                     "cache: " + path_ + " is in use with a capacity of " +
                         human_bytes(h.capacity_bytes) + ", this process is configured with " +
                         human_bytes(options.capacity_bytes) +
                         "; give all processes of the node the same cache_buffer_capacity_gb");
  }
}

void Segment::map_control(std::uint64_t bytes) {
  if (header_ == nullptr) {
    void* const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (p == MAP_FAILED) fail("mmap of " + path_, errno);
    // A forked child must not run on it: it has no record, so nobody would see it die.
    (void)::madvise(p, bytes, MADV_DONTFORK);
    header_ = static_cast<Header*>(p);
    control_bytes_ = bytes;
  }
  auto* const base = reinterpret_cast<std::byte*>(header_);
  const std::uint64_t tables = sizeof(Header);
  const std::uint32_t extents = header_->extents;
  extent_owner_ = reinterpret_cast<Shared<std::uint32_t>*>(base + tables);
  class_extent_ = extent_owner_ + extents;
  buckets_ = reinterpret_cast<Bucket*>(
      base + align_up(tables + std::uint64_t{extents} * 4 * (1 + kMaxClasses), kPage));
  controls_ = base + header_->controls_offset;
  bucket_mask_ = header_->buckets - 1;
  extent_control_bytes_ = header_->control_bytes;
  slot_stride_ = std::max(2u, header_->slot_stride);  // damaged headers are refused by check()
  stride_inverse_ = ~std::uint64_t{0} / slot_stride_ + 1;
}

void Segment::map_data(const CacheOptions& options) {
  const std::uint64_t bytes = header_->segment_bytes - header_->data_offset;
  void* const p = memory::map_shared_aligned(fd_, static_cast<off_t>(header_->data_offset), bytes);
  if (p == MAP_FAILED) fail("mmap of " + path_, errno);
  data_ = static_cast<std::byte*>(p);
  (void)::madvise(p, bytes, MADV_DONTFORK);
  (void)::madvise(p, bytes, MADV_DONTDUMP);
  // The pages exist (posix_fallocate) and may be in use: reading is all that a fallback may do.
  if (const int error = memory::populate(p, bytes, options.touch_threads, memory::Touch::kRead);
      error != 0) {
    fail("touching the pages of " + path_, error);
  }
  local_pins_bytes_ = std::uint64_t{slot_limit()} * sizeof(std::uint32_t);
  void* const pins = ::mmap(nullptr, local_pins_bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pins == MAP_FAILED) fail("mmap", errno);
  local_pins_ = static_cast<std::uint32_t*>(pins);
  record(self_).worker.store(1, std::memory_order_release);
}

void Segment::add_data(const CacheOptions& options) {
  check(options);
  if (data_ != nullptr) return;
  wait_for_attach_lock(locks_, path_);
  attach_locked_ = true;
  map_data(options);
  locks_.unlock_attach();
  attach_locked_ = false;
}

void Segment::take_record(const CacheOptions& options) {
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    ProcessRecord& r = record(p);
    // A used record whose process died is cleaned up by a tier before anybody may have it.
    if (r.used.load(std::memory_order_acquire) != 0 || !locks_.try_lock(p)) continue;
    UCM_CHAOS_POINT(kSegmentAttach);
    r.worker.store(0);
    r.version.store(0);
    r.pid = static_cast<std::uint32_t>(pid_);
    r.start_time = own_start_time();
    r.rank = options.rank;
    r.rank_size = options.rank_size;
    r.used.store(1, std::memory_order_release);
    self_ = p;
    break;
  }
  if (self_ == kNone) {
    throw CacheError(CacheErrorKind::kSystem, "cache: " + path_ + " has " +
                                                  std::to_string(kMaxProcesses) +
                                                  " processes already, the most it can have");
  }
  if (!shared_) map_data(options);
}

std::uint32_t Segment::join_class(const Geometry& geometry) {
  const std::lock_guard lock(Registry::mutex());
  if (shared_) wait_for_attach_lock(locks_, path_);
  const auto done = [this](std::uint32_t c) {
    if (shared_) locks_.unlock_attach();
    return c;
  };
  const auto layout = digest(geometry.layout);
  const std::uint64_t slot = geometry.object_bytes();
  for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
    GeometryClass& g = header_->geometry[c];
    if (g.used.load(std::memory_order_acquire) != 0) {
      if (g.shard_count == geometry.shard_count && g.shard_bytes == geometry.shard_bytes &&
          std::equal(layout.begin(), layout.end(), g.layout_digest)) {
        return done(c);
      }
      continue;
    }
    const std::uint64_t by_control =
        (header_->control_bytes - (kCacheLine - 1)) / control_per_slot(geometry.shard_count);
    const std::uint64_t fit = std::min(header_->extent_bytes / slot, by_control);
    if (fit == 0) {
      done(c);
      throw CacheError(CacheErrorKind::kMismatch, "cache: objects of " + human_bytes(slot) + " (" +
                                                      std::to_string(geometry.shard_count) +
                                                      " shards) do not fit the extents of " +
                                                      human_bytes(header_->extent_bytes) + " of " +
                                                      path_ + "; raise cache_buffer_capacity_gb");
    }
    g.shard_count = geometry.shard_count;
    UCM_CHAOS_POINT(kClassJoin);
    g.shard_bytes = geometry.shard_bytes;
    g.slot_bytes = slot;
    g.slots_per_extent = static_cast<std::uint32_t>(fit);
    std::copy(layout.begin(), layout.end(), g.layout_digest);
    g.used.store(1, std::memory_order_release);
    return done(c);
  }
  done(0);
  throw CacheError(CacheErrorKind::kMismatch, "cache: " + path_ + " has " +
                                                  std::to_string(kMaxClasses) +
                                                  " geometries already, the most it can have");
}

bool Segment::retired() const noexcept {
  return header_->state.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(SegmentState::kRetired);
}

bool Segment::alive(std::uint32_t process) const noexcept {
  if (process == self_) return true;
  if (process >= kMaxProcesses || record(process).used.load(std::memory_order_acquire) == 0) {
    return false;
  }
  return locks_.held_elsewhere(process);
}

bool Segment::other_workers() const noexcept {
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    if (p != self_ && record(p).worker.load(std::memory_order_acquire) != 0 && alive(p))
      return true;
  }
  return false;
}

void Segment::wake(std::uint64_t mask) noexcept {
  while (mask != 0) {
    const int p = __builtin_ctzll(mask);
    mask &= mask - 1;
    record(static_cast<std::uint32_t>(p)).version.fetch_add(1, std::memory_order_acq_rel);
    futex_wake_all(record(static_cast<std::uint32_t>(p)).version);
  }
}

bool Segment::begin_recovery(std::uint32_t process) noexcept {
  if (process == self_ || process >= kMaxProcesses) return false;
  recovery_mu_.lock();  // record locks do not exclude threads of one process
  if (record(process).used.load(std::memory_order_acquire) != 0 && locks_.try_lock(process)) {
    return true;
  }
  recovery_mu_.unlock();
  return false;
}

void Segment::end_recovery(std::uint32_t process) noexcept {
  record(process).worker.store(0, std::memory_order_relaxed);
  record(process).used.store(0, std::memory_order_release);
  locks_.unlock(process);
  recovery_mu_.unlock();
}

void Segment::abandon_recovery(std::uint32_t process) noexcept {
  locks_.unlock(process);
  recovery_mu_.unlock();
}

void Segment::retire() noexcept {
  struct stat s {};
  if (header_ == nullptr && ::fstat(fd_, &s) == 0 &&
      static_cast<std::uint64_t>(s.st_size) >= sizeof(Header)) {
    Header head{};
    if (::pread(fd_, static_cast<void*>(&head), sizeof head, 0) == sizeof head &&
        std::memcmp(head.magic, kMagic, sizeof kMagic) == 0 &&
        head.layout_version == kLayoutVersion &&
        head.data_offset <= static_cast<std::uint64_t>(s.st_size)) {
      const auto state = static_cast<std::uint32_t>(SegmentState::kRetired);
      (void)::pwrite(fd_, &state, sizeof state, offsetof(Header, state));
      (void)::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                        static_cast<off_t>(head.data_offset),
                        static_cast<off_t>(s.st_size - static_cast<off_t>(head.data_offset)));
    }
  } else if (header_ != nullptr) {
    header_->state.store(static_cast<std::uint32_t>(SegmentState::kRetired),
                         std::memory_order_release);
    // A watcher that still maps the control part must not keep the data allocated.
    (void)::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                      static_cast<off_t>(header_->data_offset),
                      static_cast<off_t>(header_->segment_bytes - header_->data_offset));
  }
  UCM_CHAOS_POINT(kSegmentRetire);
  if (shared_) ::unlink(path_.c_str());
}

void Segment::leave() noexcept {
  const auto give_up = std::chrono::steady_clock::now() + 5s;
  while (shared_ && !attach_locked_ && !(attach_locked_ = locks_.try_lock_attach())) {
    if (std::chrono::steady_clock::now() >= give_up) return;  // the next attach finds us gone
    std::this_thread::sleep_for(kAttachPoll);
  }
  record(self_).worker.store(0, std::memory_order_relaxed);
  record(self_).used.store(0, std::memory_order_release);
  UCM_CHAOS_POINT(kSegmentLeave);
  if (data_ != nullptr && !other_workers()) retire();
}

Segment::~Segment() {
  // After fork: not our locks, not our mapping, and the thread does not exist here. With pins: I/O
  // that never came back may still land. Keep it all.
  if (::getpid() != pid_ || pinned.load() != 0) {
    keep_for_ever(std::move(watch_));
    return;
  }
  std::unique_lock<std::recursive_mutex> lock(Registry::mutex(), std::defer_lock);
  if (registered_) lock.lock();
  if (self_ != kNone) leave();
  if (local_pins_ != nullptr) ::munmap(local_pins_, local_pins_bytes_);
  if (data_ != nullptr) ::munmap(data_, header_->segment_bytes - header_->data_offset);
  if (header_ != nullptr) ::munmap(static_cast<void*>(header_), control_bytes_);
  ::close(fd_);  // and with it every lock that is left
  if (registered_) Registry::remove(path_);
}

}  // namespace ucm::cache
