// Ranks of a node over one slow medium: who fetches what, how long it takes, what waiting costs.
#include <sys/mman.h>
#include <sys/resource.h>

#include <condition_variable>
#include <deque>

#include "cache/sizing.h"
#include "cache_fixture.h"
#include "ucm/device.h"
#include "ucm/store.h"

namespace ucm::testing {
namespace {

using namespace std::chrono_literals;

/// Of all processes of a test, in memory that they share.
struct Board {
  std::atomic<int> ready{0};
  std::atomic<int> reads{0};
  std::atomic<int> in_flight{0};
  std::atomic<int> most_in_flight{0};
  std::atomic<int> failed{0};
  std::atomic<std::int64_t> first_ns{INT64_MAX};
  std::atomic<std::int64_t> last_ns{0};
  std::atomic<std::int64_t> cpu_us{0};
};

class SharedBoard {
 public:
  SharedBoard()
      : at_(::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                   0)) {
    new (at_) Board;
  }
  ~SharedBoard() { ::munmap(at_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;
  Board* operator->() const { return static_cast<Board*>(at_); }
  Board& operator*() const { return *static_cast<Board*>(at_); }

 private:
  void* at_;
};

template <class T>
void raise_to(std::atomic<T>& word, T value) {
  T now = word.load();
  while (value > now && !word.compare_exchange_weak(now, value)) {
  }
}

/// A medium that holds everything and serves one operation at a time, each shard in `latency`.
class SlowStage final : public Stage {
 public:
  SlowStage(Geometry g, std::chrono::milliseconds latency, Board& board)
      : g_(std::move(g)), latency_(latency), board_(board), thread_([this] { run(); }) {}
  ~SlowStage() override { shutdown({}); }
  const Geometry& geometry() const noexcept override { return g_; }
  std::string name() const override { return "Slow"; }
  void lookup(std::span<const BlockId>, std::span<std::uint8_t> present, bool) noexcept override {
    std::fill(present.begin(), present.end(), std::uint8_t{1});
  }
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline) noexcept override {
    const std::lock_guard lock(mu_);
    for (const ReadOp& op : ops) queue_.emplace_back(op, sink);
    cv_.notify_one();
  }
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline) noexcept override {
    for (const WriteOp& op : ops) sink->on_written(op.cookie, {Status::kOk, 0});
  }
  void touch(std::span<const BlockId>) noexcept override {}
  void remove(std::span<const BlockId>) noexcept override {}
  std::map<std::string, std::uint64_t> stats() const override { return {}; }
  std::string health() const override { return {}; }
  void shutdown(Deadline) noexcept override {
    {
      const std::lock_guard lock(mu_);
      stop_ = true;
      cv_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    std::unique_lock lock(mu_);
    for (;;) {
      cv_.wait(lock, [&] { return stop_ || !queue_.empty(); });
      if (stop_) return;
      const auto [op, sink] = queue_.front();
      queue_.pop_front();
      lock.unlock();
      for (std::uint32_t s = op.begin; s < op.end; ++s) {
        ++board_.reads;
        raise_to(board_.most_in_flight, ++board_.in_flight);
        std::this_thread::sleep_for(latency_);
        fill(g_, Slot{op.into, 0}, op.id, s);
        --board_.in_flight;
        sink->on_read(op.cookie, s, s + 1, {Status::kOk, 0});
      }
      lock.lock();
    }
  }

  const Geometry g_;
  const std::chrono::milliseconds latency_;
  Board& board_;
  std::mutex mu_;
  std::condition_variable cv_;
  std::deque<std::pair<ReadOp, std::shared_ptr<ReadSink>>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

std::int64_t cpu_us() {
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);
  return (use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1'000'000 + use.ru_utime.tv_usec +
         use.ru_stime.tv_usec;
}

class CacheRanksTest : public CacheTest {
 protected:
  /// One rank: attach, wait for the others, `before`, load all shards of `objects` objects, check them.
  int rank_process(const Geometry& g, std::uint32_t rank, std::uint32_t ranks,
                   std::uint32_t objects, std::chrono::milliseconds latency, Board& board,
                   std::chrono::milliseconds delay = 0ms, bool everything = false) {
    auto o = options(g, 64);
    o.rank = rank;
    o.rank_size = ranks;
    auto stage = std::make_shared<SlowStage>(g, latency, board);
    StoreOptions s;
    // One object at a time, or everything at once, which leaves nothing to who comes later.
    s.running_depth = rank == 0 && everything ? 64 : 1;
    Store store(stage, open_cache(g, o), host_device(), s);
    std::vector<BlockId> ids;
    std::vector<std::uint32_t> shards;
    std::vector<std::byte> memory(std::size_t{objects} * g.shard_count * g.shard_bytes);
    std::vector<std::uint64_t> addresses;
    for (std::uint32_t i = 0; i < objects * g.shard_count; ++i) {
      ids.push_back(id_of(i / g.shard_count));
      shards.push_back(i % g.shard_count);
      addresses.push_back(reinterpret_cast<std::uint64_t>(memory.data() + i * g.shard_bytes));
    }
    ++board.ready;
    while (board.ready.load() < static_cast<int>(ranks)) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(delay);
    const std::int64_t used = cpu_us();
    const std::int64_t began = Clock::now().time_since_epoch().count();
    std::int64_t first = board.first_ns.load();
    while (began < first && !board.first_ns.compare_exchange_weak(first, began)) {
    }
    const auto task = store.load({ids, shards, addresses});
    const bool done = task->wait_until(Clock::now() + 20s);
    raise_to(board.last_ns, static_cast<std::int64_t>(Clock::now().time_since_epoch().count()));
    if (delay > 0ms) board.cpu_us = cpu_us() - used;
    bool right = done;
    for (std::size_t i = 0; right && i < ids.size(); ++i) {
      right = task->outcome(i).status == Status::kOk;
      for (std::uint64_t b = 0; right && b < g.shard_bytes; ++b) {
        right = memory[i * g.shard_bytes + b] == static_cast<std::byte>(pattern(ids[i], shards[i]));
      }
    }
    if (!right) ++board.failed;
    ++board.ready;  // nobody takes the segment down while others still load
    while (board.ready.load() < static_cast<int>(2 * ranks)) std::this_thread::sleep_for(1ms);
    return right ? 0 : 1;
  }
};

TEST_F(CacheRanksTest, FourRanksFetchEveryShardOnceFourAtATime) {
  // Twelve objects of one shard, and one object of twelve.
  for (const std::uint32_t objects : {12u, 1u}) {
    const auto g = geometry_of(12 / objects, 4096);
    std::int64_t best_ns = INT64_MAX;
    for (int attempt = 0; attempt < 20 && best_ns >= 80'000'000; ++attempt) {
      SharedBoard board;
      std::vector<pid_t> children;
      for (std::uint32_t r = 0; r < 4; ++r) {
        children.push_back(spawn([&] { return rank_process(g, r, 4, objects, 20ms, *board); }));
      }
      for (const pid_t pid : children) EXPECT_EQ(wait_exit(pid), 0);
      EXPECT_EQ(board->reads, 12) << "every shard is read once on the node";
      EXPECT_EQ(board->most_in_flight, 4);
      best_ns = std::min(best_ns, board->last_ns.load() - board->first_ns.load());
    }
    // Three steps of 20 ms and not four, by the quickest of some attempts: the machine may be busy.
    // How near to 60 ms it comes is the benchmark's to say.
    EXPECT_LT(best_ns, 80'000'000) << objects << " objects";
    EXPECT_GE(best_ns, 60'000'000);
  }
}

TEST_F(CacheRanksTest, WaitingForTwoSecondsCostsNoCpu) {
  const auto g = geometry_of(4, 4096);
  SharedBoard board;
  // Rank 0 fetches an object in 4 x 500 ms, rank 1 asks for it a moment later and waits.
  const pid_t owner = spawn([&] { return rank_process(g, 0, 2, 1, 500ms, *board, 0ms, true); });
  const pid_t waiter = spawn([&] { return rank_process(g, 1, 2, 1, 500ms, *board, 30ms); });
  EXPECT_EQ(wait_exit(owner), 0);
  EXPECT_EQ(wait_exit(waiter), 0);
  EXPECT_EQ(board->reads, 4);
  EXPECT_GE(board->last_ns.load() - board->first_ns.load(), 1'990'000'000);
  EXPECT_LT(board->cpu_us, 20'000) << "1 % of two seconds";
}

TEST(CachePlacement, SpreadsOverNodesWhereThereIsMoreThanOne) {
  for (const char* many : {"0-1\n", "0,2\n", "0-3,8-11\n"}) EXPECT_TRUE(cache::several_nodes(many));
  for (const char* one : {"0\n", "0", "7\n", ""}) EXPECT_FALSE(cache::several_nodes(one));
}

}  // namespace
}  // namespace ucm::testing
