#include "worker.h"

#include <dirent.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "faults.h"
#include "stack.h"

namespace ucm::chaos {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kBatch = 6;  // objects of one operation at most

std::size_t open_descriptors() {
  std::size_t n = 0;
  DIR* const dir = ::opendir("/proc/self/fd");
  while (dir != nullptr && ::readdir(dir) != nullptr) ++n;
  if (dir != nullptr) ::closedir(dir);
  return n;
}

/// Rows of whole objects with engine memory of their own.
struct Batch {
  std::uint32_t shape = 0;
  std::vector<std::uint32_t> keys;
  std::vector<BlockId> ids;  // per row
  std::vector<std::uint32_t> shards;
  std::vector<std::uint64_t> addresses;
  std::vector<std::byte> memory;
  std::uint64_t row_bytes = 0;

  Batch(std::uint32_t s, std::vector<std::uint32_t> k, bool filled) : shape(s), keys(std::move(k)) {
    const Geometry g = geometry_of(shape);
    row_bytes = align_up(g.shard_bytes, 64);
    memory.assign(keys.size() * g.shard_count * row_bytes, std::byte{0xEE});
    for (const std::uint32_t key : keys) {
      for (std::uint32_t i = 0; i < g.shard_count; ++i) {
        std::byte* const at = memory.data() + ids.size() * row_bytes;
        if (filled) fill(at, shape, key, i, g.shard_bytes);
        ids.push_back(id_of(shape, key));
        shards.push_back(i);
        addresses.push_back(reinterpret_cast<std::uint64_t>(at));
      }
    }
  }
  [[nodiscard]] Rows rows() const { return {ids, shards, addresses}; }
  [[nodiscard]] std::uint32_t key_of(std::size_t row) const {
    return keys[row / geometry_of(shape).shard_count];
  }
  [[nodiscard]] std::uint64_t wrong(std::size_t row) const {
    return wrong_bytes(memory.data() + row * row_bytes, shape, key_of(row), shards[row],
                       geometry_of(shape).shard_bytes);
  }
};

class Worker {
 public:
  Worker(const Plan& plan, Board& board, std::uint32_t index, std::uint64_t seed)
      : plan_(plan), board_(board), me_(board.worker[index]), index_(index), random_(seed) {
    if (plan.io_faults || plan.slab) {
      const bool deadly = plan.slab && !(plan.keeper && index == 0);
      faults_ = std::make_shared<RandomFaults>(random_(), plan.io_faults ? 60 : 0, deadly, board);
    }
  }

  int run() {
    const std::size_t before = open_descriptors();
    while (working()) {
      if (!stack_ && !open()) continue;
      operate();
      const bool keeps = plan_.keeper && index_ == 0;  // the segment lives as long as the round
      if (!keeps && random_() % 24 == 0 && board_.calm.load() == 0) close();
    }
    if (index_ == 0) inspect();
    close();
    if (const std::size_t after = open_descriptors(); after != before) {
      board_.report("descriptors leaked: " + std::to_string(before) + " before, " +
                    std::to_string(after) + " after");
    }
    return 0;
  }

 private:
  [[nodiscard]] bool working() const {
    return board_.mode.load() == static_cast<std::uint32_t>(Mode::kWork);
  }

  bool open() {
    shape_ = index_ == 0 ? 0 : static_cast<std::uint32_t>(random_() % kShapes);
    const Span span(*this, 0);
    try {
      stack_ = std::make_unique<Stack>(plan_, shape_, faults_);
      board_.add(Count::kAttaches);
      me_.ready.store(1);
      return true;
    } catch (const CacheError& e) {
      board_.add(Count::kRefusedAttaches);
      const bool told = std::string(e.what()).find("layout version") != std::string::npos;
      if (!plan_.aliens || e.kind() != CacheErrorKind::kMismatch || !told) {
        board_.report(std::string("attach refused: ") + e.what());
      }
    } catch (const PosixSetupError& e) {
      board_.add(Count::kRefusedAttaches);
      if (!plan_.full && !plan_.file_limit) {
        board_.report(std::string("set-up refused: ") + e.what());
      }
    }
    std::this_thread::sleep_for(2ms);
    return false;
  }

  void close() {
    const Span span(*this, 1);
    me_.ready.store(0);
    stack_.reset();
  }

  void operate() {
    const auto dice = random_() % 100;
    const Span span(*this, 2 + static_cast<std::uint32_t>(dice));
    if (dice < 30) return dump();
    if (dice < 72) return load();
    if (dice < 80) return lookup();
    if (dice < 90) return dump_explicitly();
    if (dice < 93) return (void)stack_->store->touch(some_ids());
    if (dice < 95) return (void)stack_->store->prefetch(some_ids());
    if (dice < 98 && plan_.removes) {
      board_.add(Count::kRemoves);
      return stack_->store->remove(some_ids());
    }
    if (plan_.collect || dice == 99) {
      board_.add(Count::kCollections);
      (void)stack_->posix->collect_now(2s);
    }
  }

  std::vector<std::uint32_t> some_keys() {
    std::vector<std::uint32_t> keys;
    const auto first = static_cast<std::uint32_t>(random_() % kKeys);
    const auto n = 1 + random_() % kBatch;
    for (std::uint32_t i = 0; i < n; ++i) keys.push_back((first + i * 7) % kKeys);
    return keys;
  }
  std::vector<BlockId> some_ids() {
    std::vector<BlockId> ids;
    for (const std::uint32_t key : some_keys()) ids.push_back(id_of(shape_, key));
    return ids;
  }

  void dump() {
    board_.add(Count::kDumps);
    const Batch batch(shape_, some_keys(), true);
    const auto task = stack_->store->dump(batch.rows(), 0, CommitMode::kAuto);
    await(*task, "dump");
    if (random_() % 2 == 0) await_durable(*task, batch);
  }

  void dump_explicitly() {
    board_.add(Count::kDiscards);
    const Batch batch(shape_, some_keys(), true);
    std::vector<BlockId> ids;
    for (const std::uint32_t key : batch.keys) ids.push_back(id_of(shape_, key));
    const auto task = stack_->store->dump(batch.rows(), 0, CommitMode::kExplicit);
    await(*task, "dump (explicit)");
    if (random_() % 2 == 0) return stack_->store->discard(ids);
    const auto commit = stack_->store->commit(ids);
    await(*commit, "commit");
  }

  void await(Task& task, const char* what) {
    if (!task.wait_until(Clock::now() + std::chrono::milliseconds(kWaitBoundMs))) {
      board_.report(std::string("wait past the bound: ") + what);
      task.give_up(Status::kTimeout);
    }
  }

  void await_durable(Task& task, const Batch& batch) {
    if (!task.wait_durable_until(Clock::now() + std::chrono::milliseconds(kWaitBoundMs))) {
      board_.report("wait past the bound: durable");
      return task.give_up_durable(Status::kTimeout);
    }
    const std::uint32_t shards = geometry_of(batch.shape).shard_count;
    for (std::size_t k = 0; k < batch.keys.size(); ++k) {
      bool whole = true;
      for (std::uint32_t i = 0; i < shards; ++i) {
        whole &= task.durable_outcome(k * shards + i).status == Status::kOk;
      }
      if (whole) {
        board_.key[batch.shape][batch.keys[k]].stored.store(1);
      } else {
        board_.add(Count::kDumpsFailed);
      }
    }
  }

  void load() {
    board_.add(Count::kLoads);
    load(Batch(shape_, some_keys(), false));
  }

  std::uint64_t load(const Batch& batch) {
    const auto task = stack_->store->load(batch.rows());
    await(*task, "load");
    std::uint64_t loaded = 0;
    for (std::size_t row = 0; row < batch.ids.size(); ++row) {
      const Outcome outcome = task->outcome(row);
      const std::string which = " (shape " + std::to_string(batch.shape) + " key " +
                                std::to_string(batch.key_of(row)) + " shard " +
                                std::to_string(batch.shards[row]) + ")";
      switch (outcome.status) {
        case Status::kOk:
          ++loaded;
          board_.add(Count::kRowsLoaded);
          if (const auto wrong = batch.wrong(row); wrong != 0) {
            board_.report(std::to_string(wrong) + " wrong bytes were loaded" + which);
          }
          break;
        case Status::kMiss:
          board_.add(Count::kRowsMissed);
          break;
        case Status::kCorrupt:
          board_.add(Count::kRowsCorrupt);
          if (board_.key[batch.shape][batch.key_of(row)].damaged.load() == 0) {
            board_.report("an object that nobody damaged is corrupt" + which);
          }
          break;
        case Status::kPending:
          board_.report("a row is open after its wait" + which);
          break;
        default:
          board_.add(Count::kRowsFailed);
      }
    }
    return loaded;
  }

  void lookup() {
    board_.add(Count::kLookups);
    const auto ids = some_ids();
    std::vector<std::uint8_t> present(ids.size());
    stack_->store->lookup(ids, present);
  }

  /// What the dead have left behind, once everybody else has gone.
  void inspect() {
    if (plan_.cache && stack_) await_cleanliness();
    board_.clean.store(1);
    while (board_.mode.load() != static_cast<std::uint32_t>(Mode::kInspect)) {
      std::this_thread::sleep_for(1ms);
    }
    if (faults_) faults_->stop();
    // The segment that the dead have used is this process's as long as one of its stores is open.
    std::unique_ptr<Stack> other;
    for (std::uint32_t shape = 0; shape < kShapes; ++shape) {
      shape_ = shape;
      if (shape != 0 || !stack_) {
        stack_.swap(other);
        try {
          stack_ = std::make_unique<Stack>(plan_, shape, nullptr);
        } catch (const std::exception& e) {
          if (!plan_.full) board_.report(std::string("the inspector cannot open: ") + e.what());
          return;
        }
      }
      board_.inspected.store(1);
      if (plan_.cache) await_cleanliness();
      for (std::uint32_t key = 0; key < kKeys; ++key) look_at(key);
    }
  }

  void look_at(std::uint32_t key) {
    const BlockId id = id_of(shape_, key);
    std::uint8_t present = 0;
    stack_->store->lookup({&id, 1}, {&present, 1});
    const Span span(*this, 200);
    const bool lost = board_.key[shape_][key].stored.load() != 0 && !plan_.may_lose();
    if (present == 0) {
      if (lost) board_.report("a durable object is gone: key " + std::to_string(key));
      return;
    }
    board_.add(Count::kBlocksInspected);
    const Batch batch(shape_, {key}, false);
    const std::uint64_t loaded = load(batch);
    if (loaded != batch.ids.size() && !plan_.may_lose()) {
      board_.report("a present object does not load whole: key " + std::to_string(key));
    }
  }

  void await_cleanliness() {
    const auto give_up = Clock::now() + std::chrono::milliseconds(kWaitBoundMs);
    for (;;) {
      const auto s = stack_->tier->stats();
      const auto pinned = s.at("slots_pinned"), dumping = s.at("slots_dumping"),
                 others = s.at("processes_workers") - 1;
      if (pinned == 0 && dumping == 0 && others == 0) {
        if (shape_ == 0 && board_.clean.load() != 0) {  // once, of the whole segment
          board_.add(Count::kTakeovers, s.at("shards_taken_over_total"));
          board_.add(Count::kRecovered, s.at("processes_recovered_total"));
        }
        return;
      }
      if (Clock::now() > give_up) {
        return board_.report("slots leaked: " + std::to_string(pinned) + " pinned, " +
                             std::to_string(dumping) + " being dumped, " + std::to_string(others) +
                             " records of the dead");
      }
      std::this_thread::sleep_for(2ms);
    }
  }

  /// Tells the parent how long this process has been in one call.
  class Span {
   public:
    Span(Worker& worker, std::uint32_t operation) : worker_(worker), begun_(Clock::now()) {
      worker.me_.operation.store(operation);
      worker.me_.busy_since_ns.store(begun_.time_since_epoch().count());
    }
    ~Span() {
      worker_.me_.busy_since_ns.store(0);
      const std::int64_t took = (Clock::now() - begun_).count();
      auto& longest = worker_.board_.longest_ns;
      std::uint64_t seen = longest.load();
      while (seen < static_cast<std::uint64_t>(took) &&
             !longest.compare_exchange_weak(seen, static_cast<std::uint64_t>(took))) {
      }
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    Worker& worker_;
    const Clock::time_point begun_;
  };

  const Plan& plan_;
  Board& board_;
  WorkerState& me_;
  const std::uint32_t index_;
  Random random_;
  std::shared_ptr<RandomFaults> faults_;
  std::uint32_t shape_ = 0;
  std::unique_ptr<Stack> stack_;
};

}  // namespace

int run_worker(const Plan& plan, Board& board, std::uint32_t index, std::uint64_t seed,
               const Settings& settings) {
  Random random(seed);
  arm(settings);
  // Never the inspector: it must be able to open whatever there is.
  if (plan.file_limit && index != 0 && random() % 3 == 0) {
    // Below the size of an object, above what set-up writes. The process gets EFBIG, not the signal.
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{20'000, 20'000};
    (void)::setrlimit(RLIMIT_FSIZE, &limit);
  }
  try {
    return Worker(plan, board, index, random()).run();
  } catch (const std::exception& e) {
    board.report(std::string("a worker failed: ") + e.what());
    return 1;
  }
}

int run_visitor(const Plan& plan) {
  try {
    const auto tier = open_cache(geometry_of(0), cache_options(plan));
    return 0;
  } catch (const CacheError&) {
    return 0;
  }
}

}  // namespace ucm::chaos
