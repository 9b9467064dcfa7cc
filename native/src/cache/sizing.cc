#include "cache/sizing.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <limits>

#include "cache/layout.h"

namespace ucm::cache {
namespace {

/// Extents aim at this size: large enough that groups seldom move them, small enough to share.
constexpr std::uint64_t kExtentTarget = 64ULL << 20;
constexpr std::uint64_t kMinExtents = 8;
/// Least control memory per byte of data, so that groups with smaller objects than the creator's
/// can use an extent too.
constexpr std::uint64_t kControlShare = 64;

/// First number found after `key` in a small text file; `otherwise` when there is none.
std::uint64_t number_in(const char* path, const char* key, std::uint64_t otherwise) noexcept {
  char text[4096];
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return otherwise;
  const ssize_t n = ::read(fd, text, sizeof text - 1);
  ::close(fd);
  if (n <= 0) return otherwise;
  text[n] = '\0';
  const char* at = std::strstr(text, key);
  if (at == nullptr) return otherwise;
  std::uint64_t value = 0;
  return std::sscanf(at + std::strlen(key), "%" SCNu64, &value) == 1 ? value : otherwise;
}

/// What the memory controller of this process's own group leaves; "max" means no limit.
std::uint64_t cgroup_room() noexcept {
  constexpr auto kNoLimit = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t limit = number_in("/sys/fs/cgroup/memory.max", "", kNoLimit);
  std::uint64_t used = number_in("/sys/fs/cgroup/memory.current", "", 0);
  if (limit == kNoLimit) {
    limit = number_in("/sys/fs/cgroup/memory/memory.limit_in_bytes", "", kNoLimit);
    used = number_in("/sys/fs/cgroup/memory/memory.usage_in_bytes", "", 0);
  }
  if (limit == kNoLimit) return kNoLimit;
  return limit > used ? limit - used : 0;
}

}  // namespace

Plan make_plan(std::uint64_t capacity, const Geometry& geometry) noexcept {
  Plan plan;
  plan.capacity = capacity;
  const std::uint64_t slot = geometry.object_bytes();
  const std::uint64_t slots = slot == 0 ? 0 : capacity / slot;
  if (slots == 0) return plan;
  const std::uint64_t by_size = std::max<std::uint64_t>(1, kExtentTarget / slot);
  const std::uint64_t by_count = std::max<std::uint64_t>(1, slots / kMinExtents);
  std::uint64_t per_extent = std::min(by_size, by_count);
  std::uint64_t extents = slots / per_extent;
  per_extent = slots / extents;  // spread what is left over
  const std::uint64_t own = per_extent * control_per_slot(geometry.shard_count) + kCacheLine;
  const std::uint64_t control = align_up(std::max(own, per_extent * slot / kControlShare), kPage);
  plan.extent_bytes = per_extent * slot;
  plan.extents = static_cast<std::uint32_t>(extents);
  plan.control_bytes = static_cast<std::uint32_t>(control);
  plan.slot_stride = static_cast<std::uint32_t>(control / control_per_slot(1) + 1);
  plan.buckets = static_cast<std::uint32_t>(
      std::bit_ceil(std::max<std::uint64_t>(64, extents * per_extent * 2)));
  const std::uint64_t tables = extents * sizeof(std::uint32_t) * (1 + kMaxClasses);
  const std::uint64_t buckets_at = align_up(sizeof(Header) + tables, kPage);
  plan.controls_offset = align_up(buckets_at + plan.buckets * sizeof(Bucket), kPage);
  plan.data_offset = align_up(plan.controls_offset + extents * control, 2ULL << 20);
  plan.segment_bytes = plan.data_offset + extents * plan.extent_bytes;
  return plan;
}

std::uint64_t available_memory() noexcept {
  const std::uint64_t kib = number_in("/proc/meminfo", "MemAvailable:", 0);
  return std::min(kib * 1024, cgroup_room());
}

std::uint64_t free_space(const std::string& directory) noexcept {
  struct statvfs s {};
  if (::statvfs(directory.c_str(), &s) != 0) return 0;
  return static_cast<std::uint64_t>(s.f_bavail) * s.f_frsize;
}

bool several_nodes(std::string_view online) noexcept {
  return online.find_first_of("-,") != std::string_view::npos;
}

void advise_placement(void* data, std::uint64_t bytes) noexcept {
  (void)::madvise(data, bytes, MADV_HUGEPAGE);  // heeded only where shmem huge pages are on
#ifdef SYS_mbind
  // All ranks of the machine use the segment, so it is spread evenly.
  char online[64] = {};
  const int fd = ::open("/sys/devices/system/node/online", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  const ssize_t n = ::read(fd, online, sizeof online - 1);
  ::close(fd);
  if (n <= 0 || !several_nodes({online, static_cast<std::size_t>(n)})) return;
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE
  unsigned long mask[16];
  std::memset(mask, 0xff, sizeof mask);  // the kernel cuts it down to the nodes allowed
  (void)::syscall(SYS_mbind, data, bytes, kInterleave, mask, sizeof mask * 8, 0);
#endif
}

std::string human_bytes(std::uint64_t bytes) {
  char text[32];
  const double mib = static_cast<double>(bytes) / (1 << 20);
  if (mib >= 1024) {
    std::snprintf(text, sizeof text, "%.2f GiB", mib / 1024);
  } else {
    std::snprintf(text, sizeof text, "%.2f MiB", mib);
  }
  return text;
}

}  // namespace ucm::cache
