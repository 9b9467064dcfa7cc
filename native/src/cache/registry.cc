#include "cache/registry.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>

#include "cache/file_lock.h"
#include "cache/segment.h"

namespace ucm::cache {
namespace {

struct Entry {
  std::weak_ptr<Segment> segment;
  pid_t pid;
};

// Never destroyed: segments may outlive static destruction.
struct State {
  Registry::Mutex mu;
  std::condition_variable_any gone;
  std::map<std::string, Entry> open;
};
State& state() noexcept {
  static State* const s = new State;
  return *s;
}

std::string prefix() { return "ucm-cache-" + std::to_string(::getuid()) + "-"; }

}  // namespace

Registry::Mutex& Registry::mutex() noexcept { return state().mu; }

std::shared_ptr<Segment> Registry::find(const std::string& path, std::unique_lock<Mutex>& lock) {
  auto& open = state().open;
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (;;) {
    const auto it = open.find(path);
    if (it == open.end()) return nullptr;
    if (it->second.pid != ::getpid()) {  // inherited by fork: the parent's, not ours
      open.erase(it);
      return nullptr;
    }
    if (auto segment = it->second.segment.lock()) {
      if (!segment->retired()) return segment;
      open.erase(it);  // a watcher's, of a file that is unlinked: another inode, no lock in common
      return nullptr;
    }
    if (state().gone.wait_until(lock, patience) == std::cv_status::timeout) {
      throw CacheError(
          CacheErrorKind::kSystem,
          "cache: I/O of an earlier store of this process never came back, its memory " + path +
              " cannot be opened again; restart the process");
    }
  }
}

void Registry::add(const std::string& path, const std::shared_ptr<Segment>& segment) {
  state().open[path] = {segment, ::getpid()};
}

void Registry::remove(const std::string& path) {
  auto& open = state().open;
  const auto it = open.find(path);
  if (it != open.end() && it->second.segment.expired()) open.erase(it);
  state().gone.notify_all();
}

bool Registry::has(const std::string& path) {
  const auto it = state().open.find(path);
  return it != state().open.end() && it->second.pid == ::getpid();
}

std::string segment_path(const CacheOptions& options) {
  return options.directory + "/" + prefix() + options.name;
}

std::uint32_t reserve_slots(const CacheOptions& options, const Geometry& geometry,
                            std::uint64_t total_slots) noexcept {
  const std::uint64_t shards = std::max<std::uint32_t>(geometry.shard_count, 1);
  std::uint64_t slots = (options.load_reserve + shards - 1) / shards;
  if (!options.load_reserve_explicit) slots = std::min(slots, total_slots / 4);
  return static_cast<std::uint32_t>(slots);
}

std::uint64_t minimum_cache_bytes(const CacheOptions& options, const Geometry& geometry) noexcept {
  const std::uint64_t reserve =
      options.load_reserve_explicit ? reserve_slots(options, geometry, ~std::uint64_t{0}) : 0;
  return (reserve + 2) * geometry.object_bytes();
}

}  // namespace ucm::cache

namespace ucm {

std::uint64_t default_cache_bytes(const std::string& directory, bool shared) {
  const std::uint64_t memory = cache::available_memory() / 4;
  return shared ? std::min(memory, cache::free_space(directory) / 2) : memory;
}

std::vector<std::string> reclaim_dead_caches(const std::string& directory) {
  std::vector<std::string> removed;
  const std::lock_guard lock(cache::Registry::mutex());
  DIR* const dir = ::opendir(directory.c_str());
  if (dir == nullptr) return removed;
  const std::string prefix = cache::prefix();
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    const std::string path = directory + "/" + name;
    if (name.rfind(prefix, 0) != 0 || cache::Registry::has(path)) continue;
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) continue;
    // A creator holds the attach lock from before its first byte until it is registered, and checks
    // afterwards that the name is still its file: so a fresh segment is never taken for a dead one.
    const cache::FileLocks locks(fd);
    struct stat ours {
    }, named{};
    if (locks.supported() && locks.try_lock_attach() && !locks.any_held_elsewhere() &&
        ::fstat(fd, &ours) == 0 && ::stat(path.c_str(), &named) == 0 &&
        ours.st_ino == named.st_ino && ::unlink(path.c_str()) == 0) {
      removed.push_back(name);
    }
    ::close(fd);
  }
  ::closedir(dir);
  return removed;
}

void rotate_order(std::uint32_t n, Rotation rotation, std::uint32_t* out) noexcept {
  const std::uint32_t ranks = std::max<std::uint32_t>(rotation.ranks, 1);
  for (std::uint32_t k = 0; k < ranks; ++k) {
    for (std::uint32_t s = (rotation.rank + k) % ranks; s < n; s += ranks) *out++ = s;
  }
}

}  // namespace ucm
