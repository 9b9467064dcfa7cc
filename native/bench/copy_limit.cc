// The copy kernel alone, on the strides of a real engine cache: what a hot load or a dump cannot
// beat. Source and destination are the same kinds of memory as in use: a shared mapping of the
// page cache (tmpfs) on the store's side, private pages on the engine's.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <memory>
#include <thread>
#include <vector>

#include "memory/huge.h"
#include "meter.h"
#include "ucm/copy.h"

namespace ucm::bench {
namespace {

/// A mapping whose pages exist; unmapped on destruction.
class Pages {
 public:
  Pages(std::size_t bytes, bool shared) : bytes_(bytes) {
    // Huge pages on both sides, as the store's segment and an engine's large tensors have them.
    void* at = MAP_FAILED;
    if (shared) {
      const int fd = memfd_create("ucm-limits", MFD_CLOEXEC);
      if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        throw std::runtime_error("memfd_create failed");
      }
      at = memory::map_shared_aligned(fd, 0, bytes);
      if (at != MAP_FAILED) (void)memory::back_with_huge_pages(fd, 0, at, bytes, 1);
      close(fd);
    } else {
      at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (at != MAP_FAILED) (void)madvise(at, bytes, MADV_HUGEPAGE);
    }
    if (at == MAP_FAILED) throw std::runtime_error("mmap failed");
    data_ = static_cast<std::byte*>(at);
    // Different bytes in every page: a host that merges equal pages must not help.
    for (std::size_t i = 0; i < bytes; i += 4096) std::memset(data_ + i, int(i / 4096 % 251), 4096);
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

/// One shape of engine cache with its memory and the address table of every object's shards.
struct Cache {
  std::string name;
  std::size_t objects = 0, shards = 0, runs = 0, run_bytes = 0, shard_stride = 0;
  std::unique_ptr<Pages> engine, store;
  std::vector<std::uint64_t> addresses;  ///< [object][shard][run]

  [[nodiscard]] std::byte* slot(std::size_t object, std::size_t shard) const noexcept {
    return store->data() + (object * shards + shard) * shard_stride;
  }
  [[nodiscard]] const std::uint64_t* row(std::size_t object, std::size_t shard) const noexcept {
    return addresses.data() + (object * shards + shard) * runs;
  }
};

std::vector<std::uint32_t> read_order(const std::string& path, std::size_t count) {
  std::vector<std::uint32_t> order(count);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(order.data()),
            static_cast<std::streamsize>(count * sizeof(std::uint32_t)));
  if (!file) throw std::runtime_error("order file is short: " + path);
  return order;
}

/// shards = layers; runs = engine blocks of a stored block; page `b` of layer `l` lies at
/// l * layer_stride + b * block_stride. `order` holds the engine block of every (object, run).
std::unique_ptr<Cache> build(const Args& args) {
  auto cache = std::make_unique<Cache>();
  cache->name = args.text("name");
  cache->objects = args.number("objects");
  cache->shards = args.number("shards");
  cache->runs = args.number("runs");
  cache->run_bytes = args.number("run_bytes");
  cache->shard_stride = align_up(cache->runs * cache->run_bytes, kIoAlign);
  const auto order = read_order(args.text("order"), cache->objects * cache->runs);
  cache->engine = std::make_unique<Pages>(args.number("engine_bytes"), false);
  cache->store =
      std::make_unique<Pages>(cache->objects * cache->shards * cache->shard_stride, true);
  const auto base = reinterpret_cast<std::uint64_t>(cache->engine->data());
  for (std::size_t o = 0; o < cache->objects; ++o) {
    for (std::size_t s = 0; s < cache->shards; ++s) {
      for (std::size_t r = 0; r < cache->runs; ++r) {
        cache->addresses.push_back(base + s * args.number("layer_stride") +
                                   order[o * cache->runs + r] * args.number("block_stride"));
      }
    }
  }
  return cache;
}

void move(const Cache& cache, std::size_t object, bool out, bool plain) noexcept {
  const RunShape run{cache.run_bytes, 1, 0};
  for (std::size_t s = 0; s < cache.shards; ++s) {
    std::byte* slot = cache.slot(object, s);
    const std::uint64_t* row = cache.row(object, s);
    if (plain) {
      for (std::size_t r = 0; r < cache.runs; ++r, slot += cache.run_bytes) {
        auto* page = reinterpret_cast<std::byte*>(row[r]);
        std::memcpy(out ? page : slot, out ? slot : page, cache.run_bytes);
      }
    } else if (out) {
      copy_runs_out(slot, row, cache.runs, run);
    } else {
      copy_runs_in(slot, row, cache.runs, run);
    }
  }
}

}  // namespace

Report copy_limit(const Args& args) {
  static std::unique_ptr<Cache> cache;
  if (!cache || cache->name != args.text("name")) {
    cache.reset();  // free the old memory before the new is taken
    cache = build(args);
  }
  const bool out = args.text("direction") == "out";
  const bool plain = args.text("kernel") == "memcpy";
  const std::size_t threads = args.number("threads");
  std::atomic<std::size_t> next{0};
  std::atomic<bool> go{false};
  const auto work = [&] {
    go.wait(false);
    for (std::size_t o = next.fetch_add(1); o < cache->objects; o = next.fetch_add(1)) {
      move(*cache, o, out, plain);
    }
  };
  // The calling thread is one of the workers: the others exist before the clock starts.
  std::vector<std::thread> helpers;
  for (std::size_t t = 1; t < threads; ++t) helpers.emplace_back(work);
  const Meter meter;
  go.store(true);
  go.notify_all();
  work();
  for (auto& helper : helpers) helper.join();
  const Cost cost = meter.stop();
  return {cost, cache->objects * cache->shards,
          cache->objects * cache->shards * cache->runs * cache->run_bytes};
}

}  // namespace ucm::bench
