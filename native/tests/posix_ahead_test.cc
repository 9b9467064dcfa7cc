// What can be done before a transfer is done ahead: the medium gets the next one before the last is
// looked at.
#include <algorithm>
#include <string>

#include "posix_kit.h"

namespace ucm::posix_test {
namespace {

/// What happened, in order: "open", "create", "read", "write" as they begin, "answer" as they end.
class Log {
 public:
  void add(const char* what) {
    const std::scoped_lock lock(mutex_);
    events_.emplace_back(what);
  }
  void clear() {
    const std::scoped_lock lock(mutex_);
    events_.clear();
  }
  /// Position of the n-th `what`, counted from 0.
  [[nodiscard]] std::size_t position(const std::string& what, std::size_t n) const {
    const std::scoped_lock lock(mutex_);
    for (std::size_t i = 0; i < events_.size(); ++i) {
      if (events_[i] == what && n-- == 0) return i;
    }
    ADD_FAILURE() << "no " << what << " number " << n << " among " << events_.size() << " events";
    return 0;
  }
  /// The most `first` that had begun without their `then`, at any time.
  [[nodiscard]] long most_between(const std::string& first, const std::string& then) const {
    const std::scoped_lock lock(mutex_);
    long now = 0;
    long most = 0;
    for (const auto& event : events_) {
      now += (event == first ? 1 : 0) - (event == then ? 1 : 0);
      most = std::max(most, now);
    }
    return most;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> events_;
};

class LoggedResults final : public Results {
 public:
  LoggedResults(std::size_t expected, Log& log) : Results(expected), log_(log) {}
  void on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
               Outcome o) noexcept override {
    log_.add("answer");
    Results::on_read(cookie, begin, end, o);
  }
  void on_written(std::uint64_t cookie, Outcome o) noexcept override {
    log_.add("answer");
    Results::on_written(cookie, o);
  }

 private:
  Log& log_;
};

constexpr std::size_t kObjects = 12;
/// At depth 1 one operation is prepared. Where a transfer ends at once, two are then answered together
/// before the next is prepared: every other one is ahead of the last one's answer.
constexpr std::size_t kAtLeast = (kObjects - 1) / 2;

class Ahead : public testing::Test {
 protected:
  PosixOptions options(const TempDir& dir, std::uint32_t depth, const char* engine) {
    auto o = options_for({dir.str()});
    o.engine = engine;
    o.depth = depth;
    o.read_threads = 1;
    o.faults = std::make_shared<Faults>([this](IoStep step, const std::string&, std::size_t&) {
      switch (step) {
        case IoStep::kOpenRead:
          log.add("open");
          break;
        case IoStep::kOpenWrite:
          log.add("create");
          break;
        case IoStep::kRead:
          log.add("read");
          break;
        case IoStep::kWrite:
          log.add("write");
          break;
        default:
          break;
      }
      return 0;
    });
    return o;
  }

  /// One batch of writes, all in the queue before the first is begun.
  void write_all(Harness& h) {
    std::vector<std::unique_ptr<Region>> from;
    std::vector<WriteOp> ops;
    for (std::size_t i = 0; i < kObjects; ++i) {
      from.push_back(std::make_unique<Region>(h.geometry, id_of(i)));
      ops.push_back({id_of(i), from.back()->data(), i});
    }
    const auto results = std::make_shared<LoggedResults>(kObjects, log);
    h.stage->write(ops, results, in(milliseconds(20'000)));
    ASSERT_TRUE(results->wait());
    ASSERT_EQ(results->count(Status::kOk), kObjects);
  }

  void read_all(Harness& h) {
    std::vector<std::unique_ptr<Region>> into;
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < kObjects; ++i) {
      into.push_back(std::make_unique<Region>(h.geometry));
      ops.push_back({id_of(i), into.back()->data(), 0, h.geometry.shard_count, i, true});
    }
    const auto results = std::make_shared<LoggedResults>(kObjects, log);
    h.stage->read(ops, results, in(milliseconds(20'000)));
    ASSERT_TRUE(results->wait());
    ASSERT_EQ(results->count(Status::kOk), kObjects);
    for (std::size_t i = 0; i < kObjects; ++i) EXPECT_TRUE(into[i]->holds(id_of(i)));
  }

  /// How many transfers began before the one before them was answered.
  [[nodiscard]] std::size_t ahead_of_answers(const char* transfer) const {
    std::size_t n = 0;
    for (std::size_t i = 0; i + 1 < kObjects; ++i) {
      n += log.position(transfer, i + 1) < log.position("answer", i) ? 1 : 0;
    }
    return n;
  }

  Log log;
};

class PosixAhead : public Ahead, public testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Engines, PosixAhead, testing::Values("io_uring", "aio"));

TEST_P(PosixAhead, TheNextWriteIsOnTheMediumBeforeTheLastOneIsAnswered) {
  const TempDir dir;
  Harness h(options(dir, 1, GetParam()));
  write_all(h);
  EXPECT_GE(ahead_of_answers("write"), kAtLeast);
}

// Only with aio, which opens in place: when an asynchronous open ends is the kernel's affair.
TEST_F(Ahead, TheNextReadIsOnTheMediumBeforeTheLastOneIsAnswered) {
  const TempDir dir;
  Harness h(options(dir, 1, "aio"));
  write_all(h);
  log.clear();
  read_all(h);
  EXPECT_GE(ahead_of_answers("read"), kAtLeast);
}

TEST_P(PosixAhead, NoMoreFilesAreOpenedOrCreatedAheadThanTheDepth) {
  for (const std::uint32_t depth : {1U, 3U}) {
    const TempDir dir;
    for (std::size_t i = 0; i < kObjects; ++i) {  // or each first create in a directory fails
      fs::create_directories(object_path(dir.path(), id_of(i)).parent_path());
    }
    Harness h(options(dir, depth, GetParam()));
    log.clear();
    write_all(h);
    EXPECT_LE(log.most_between("create", "write"), static_cast<long>(depth));
    log.clear();
    read_all(h);
    EXPECT_LE(log.most_between("open", "read"), static_cast<long>(depth));
    EXPECT_EQ(count_temps(dir.path()), 0u);
  }
}

}  // namespace
}  // namespace ucm::posix_test
