// Media that fail: errors, short transfers, damaged and foreign files, hung files, full disks, limits.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <iterator>
#include <latch>
#include <thread>

#include "posix_kit.h"

namespace ucm::posix_test {
namespace {

PosixOptions with(const TempDir& dir, Faults::Fn fn, const char* engine = "auto") {
  auto o = options_for({dir.str()});
  o.engine = engine;
  o.faults = std::make_shared<Faults>(std::move(fn));
  return o;
}

std::ptrdiff_t open_descriptors() {
  return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
}

// A close that fails has closed all the same, and a planned failure must not do less.
TEST(PosixFaultPlan, AFailedCloseLeaksNoDescriptor) {
  const TempDir dir;
  Harness h(with(dir, [](IoStep step, const std::string&, std::size_t&) {
    return step == IoStep::kClose ? -ENOSPC : 0;
  }));
  EXPECT_EQ(h.write(id_of(0)).error, ENOSPC);
  const auto before = open_descriptors();
  for (int i = 1; i < 20; ++i) EXPECT_EQ(h.write(id_of(i)).error, ENOSPC);
  // Threads of the stage have files open for a moment; what leaks stays.
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (open_descriptors() > before && std::chrono::steady_clock::now() < give_up) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_LE(open_descriptors(), before);
}

/// Starts reads of `ids` into fresh regions.
struct Reads {
  Reads(Harness& h, const std::vector<BlockId>& wanted, milliseconds timeout)
      : ids(wanted), results(std::make_shared<Results>(wanted.size())) {
    std::vector<ReadOp> ops;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      into.push_back(std::make_shared<Region>(h.geometry));
      ops.push_back({ids[i], into.back()->data(), 0, h.geometry.shard_count, i, true});
    }
    h.stage->read(ops, results, in(timeout));
  }
  std::vector<BlockId> ids;
  std::vector<std::shared_ptr<Region>> into;
  std::shared_ptr<Results> results;
};

class PosixFaults : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Engines, PosixFaults, testing::Values("io_uring", "aio", "psync"));

TEST_P(PosixFaults, ShortTransfersAreContinued) {
  const TempDir dir;
  Harness h(with(
      dir,
      [](IoStep step, const std::string&, std::size_t& bytes) {
        if (step == IoStep::kRead || step == IoStep::kWrite)
          bytes = std::min<std::size_t>(bytes, 8192);
        return 0;
      },
      GetParam()));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
  EXPECT_EQ(fs::file_size(object_path(dir.path(), id_of(1))), 4096 + 4 * 8192u);
}

TEST_P(PosixFaults, EveryStepOfAWriteMayFailAndNothingStays) {
  for (const IoStep broken :
       {IoStep::kOpenWrite, IoStep::kWrite, IoStep::kSync, IoStep::kClose, IoStep::kRename}) {
    for (const int error : {EIO, ENOSPC, EDQUOT}) {
      const TempDir dir;
      std::atomic<bool> on{true};
      auto o = with(
          dir,
          [&](IoStep step, const std::string&, std::size_t&) {
            return on && step == broken ? -error : 0;
          },
          GetParam());
      o.fsync = true;
      Harness h(o);
      const Outcome outcome = h.write(id_of(1));
      EXPECT_EQ(outcome.status, Status::kIoError);
      EXPECT_EQ(outcome.error, error);
      EXPECT_FALSE(h.present(id_of(1)));
      EXPECT_EQ(count_temps(dir.path()), 0u) << static_cast<int>(broken);
      EXPECT_EQ(h.stat("write_errors_total"), 1u);
      EXPECT_EQ(h.stat("write_no_space_total"), error == EIO ? 0u : 1u);
      const auto lines = h.stage->last_errors();
      ASSERT_FALSE(lines.empty());
      EXPECT_NE(lines.back().find(object_path(dir.path(), id_of(1)).string()), std::string::npos);
      EXPECT_NE(lines.back().find(strerrorname_np(error)), std::string::npos) << lines.back();
      on = false;
      EXPECT_EQ(h.write(id_of(1)).status, Status::kOk);
      EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
    }
  }
}

TEST_P(PosixFaults, ReadErrorKeepsErrnoAndTheFile) {
  const TempDir dir;
  std::atomic<int> reads{0};
  Harness h(with(
      dir,
      [&](IoStep step, const std::string&, std::size_t&) {
        return step == IoStep::kRead && ++reads == 2 ? -EIO : 0;
      },
      GetParam()));
  for (int i = 0; i < 3; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  EXPECT_EQ(h.read(id_of(0)).status, Status::kOk);
  const Outcome failed = h.read(id_of(1));
  EXPECT_EQ(failed.status, Status::kIoError);
  EXPECT_EQ(failed.error, EIO);
  EXPECT_EQ(h.read(id_of(2)).status, Status::kOk);
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk) << "an I/O error is not a reason to remove";
}

// EMFILE is a limit of the moment: both directions wait for descriptors and succeed.
TEST_P(PosixFaults, DescriptorLimitIsTransient) {
  const TempDir dir;
  Harness h([&] {
    auto o = options_for({dir.str()});
    o.engine = GetParam();
    return o;
  }());
  ASSERT_EQ(h.write(id_of(0)).status, Status::kOk);
  ASSERT_EQ(h.read(id_of(0)).status, Status::kOk);  // threads and rings exist from here on
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int top = dup(0);  // the lowest free descriptor
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(top);
  close(top);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  // Threads in the background may have held a descriptor below the limit for a moment: take those too.
  std::vector<int> taken;
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(milliseconds(10));
    for (int fd = dup(0); fd >= 0; fd = dup(0)) taken.push_back(fd);
  }
  Region from(h.geometry, id_of(1));
  auto written = std::make_shared<Results>(1);
  const WriteOp op{id_of(1), from.data(), 0};
  h.stage->write({&op, 1}, written, in(milliseconds(20'000)));
  Reads reads(h, {id_of(0)}, milliseconds(20'000));
  EXPECT_FALSE(reads.results->wait(milliseconds(100)));
  const Outcome timed = [&] {
    Reads hasty(h, {id_of(0)}, milliseconds(50));
    EXPECT_TRUE(hasty.results->wait());
    return hasty.results->at(0);
  }();
  for (const int fd : taken) close(fd);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(timed.status, Status::kTimeout);
  ASSERT_TRUE(written->wait());
  ASSERT_TRUE(reads.results->wait());
  EXPECT_EQ(written->at(0).status, Status::kOk);
  EXPECT_EQ(reads.results->at(0).status, Status::kOk);
  EXPECT_GT(h.stat("fd_limit_waits_total"), 0u);
  EXPECT_TRUE(h.present(id_of(0)));
}

TEST(PosixDamage, EveryKindIsSeenAndHealed) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  const BlockId id = id_of(1);
  const auto file = object_path(dir.path(), id);
  const auto full = 4096 + h.geometry.object_bytes();
  const std::vector<std::function<void()>> damages = {
      [&] { flip_byte(file, 0); },                // magic
      [&] { flip_byte(file, 44); },               // id in the header
      [&] { flip_byte(file, 128); },              // checksum table
      [&] { flip_byte(file, 128 + 4 * 8 + 3); },  // layout text
      [&] { flip_byte(file, 4096); },             // first byte of the first shard
      [&] { flip_byte(file, full - 1); },         // last byte of the last
      [&] { fs::resize_file(file, 0); },
      [&] { fs::resize_file(file, 100); },
      [&] { fs::resize_file(file, full - 4096); },
      [&] { fs::resize_file(file, full + 4096); },
      [&] { fs::resize_file(file, full * 2); },
  };
  std::uint64_t n = 0;
  for (const auto& damage : damages) {
    ASSERT_EQ(h.write(id).status, Status::kOk);
    ASSERT_EQ(h.read(id).status, Status::kOk);
    damage();
    EXPECT_EQ(h.read(id).status, Status::kCorrupt) << n;
    EXPECT_FALSE(fs::exists(file)) << n;
    EXPECT_EQ(h.read(id).status, Status::kMiss) << n;
    ++n;
    EXPECT_EQ(h.stat("read_corrupt_total"), n);
    EXPECT_EQ(h.stat("corrupt_removed_total"), n);
  }
}

TEST(PosixDamage, ASwappedFileIsNeverDelivered) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  ASSERT_EQ(h.write(id_of(2)).status, Status::kOk);
  fs::copy_file(object_path(dir.path(), id_of(1)), object_path(dir.path(), id_of(2)),
                fs::copy_options::overwrite_existing);
  EXPECT_EQ(h.read(id_of(2)).status, Status::kCorrupt);
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

TEST(PosixDamage, OnlyTheSameFileIsRemoved) {
  const TempDir dir;
  const BlockId id = id_of(1);
  const auto file = object_path(dir.path(), id);
  std::atomic<bool> swap{false};
  Harness h(with(dir, [&](IoStep step, const std::string&, std::size_t&) {
    // After the open of the damaged file a good one takes its place, as another writer would do.
    if (step == IoStep::kRead && swap.exchange(false)) fs::rename(dir.path() / "good", file);
    return 0;
  }));
  ASSERT_EQ(h.write(id).status, Status::kOk);
  fs::copy_file(file, dir.path() / "good");
  flip_byte(file, 5000);
  swap = true;
  EXPECT_EQ(h.read(id).status, Status::kCorrupt);
  EXPECT_TRUE(fs::exists(file));
  EXPECT_EQ(h.stat("corrupt_removed_total"), 0u);
  EXPECT_EQ(h.read(id).status, Status::kOk);
}

TEST(PosixDamage, DeletedWhileOpenStillLoads) {
  const TempDir dir;
  const BlockId id = id_of(1);
  Harness h(with(dir, [&](IoStep step, const std::string&, std::size_t&) {
    if (step == IoStep::kRead) fs::remove(object_path(dir.path(), id));
    return 0;
  }));
  ASSERT_EQ(h.write(id).status, Status::kOk);
  ASSERT_TRUE(h.present(id));
  EXPECT_EQ(h.read(id).status, Status::kOk);
  EXPECT_FALSE(h.present(id));
  EXPECT_EQ(h.read(id).status, Status::kMiss);  // gone between lookup and load
}

TEST(PosixDamage, ADumpReplacesAForeignFile) {
  const TempDir dir;
  {
    Harness other(small_geometry(2, 16384), options_for({dir.str()}));
    ASSERT_EQ(other.write(id_of(1)).status, Status::kOk);
  }
  Harness h(options_for({dir.str()}));
  EXPECT_EQ(h.read(id_of(1)).status, Status::kMiss);
  EXPECT_EQ(h.stat("read_foreign_total"), 1u);
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  EXPECT_EQ(h.stat("write_replaced_total"), 1u);
  EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
}

// B23: things that are not files in place of blocks neither hang nor disturb.
TEST_P(PosixFaults, FifoDirectoryAndLinkInPlaceOfABlock) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  o.engine = GetParam();
  Harness h(o);
  std::vector<BlockId> ids;
  for (int i = 0; i < 13; ++i) {
    ids.push_back(id_of(i));
    ASSERT_EQ(h.write(ids.back()).status, Status::kOk);
  }
  const auto path = [&](int i) { return object_path(dir.path(), id_of(i)); };
  for (int i = 0; i < 3; ++i) fs::remove(path(i));
  ASSERT_EQ(mkfifo(path(0).c_str(), 0600), 0);
  fs::create_directory(path(1));
  fs::create_symlink(path(5), path(2));
  Reads reads(h, ids, milliseconds(5'000));
  ASSERT_TRUE(reads.results->wait());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(reads.results->at(i).status, i < 3 ? Status::kMiss : Status::kOk) << i;
    EXPECT_EQ(h.present(ids[i]), i >= 3) << i;
  }
  EXPECT_EQ(h.stat("read_not_regular_total"), 3u);
  EXPECT_NE(h.stage->last_errors().back().find("not a regular file"), std::string::npos);
  EXPECT_EQ(h.write(id_of(0)).status, Status::kOk) << "a dump heals what can be replaced";
  EXPECT_EQ(h.read(id_of(0)).status, Status::kOk);
  EXPECT_EQ(h.write(id_of(1)).status, Status::kIoError);
}

// B23: I/O that hangs in the kernel: healthy loads go on, the thread is replaced and comes back.
TEST_P(PosixFaults, HungFilesDoNotStallOthers) {
  const TempDir dir;
  const std::string hung[2] = {object_path(dir.path(), id_of(0)).filename(),
                               object_path(dir.path(), id_of(1)).filename()};
  std::latch release(1);
  auto o = with(
      dir,
      [&](IoStep step, const std::string& path, std::size_t&) {
        const bool mine =
            path.find(hung[0]) != std::string::npos || path.find(hung[1]) != std::string::npos;
        if (step == IoStep::kOpenRead && mine) release.wait();
        return 0;
      },
      GetParam());
  o.read_threads = 2;
  o.stall = milliseconds(200);
  Harness h(o);
  std::vector<BlockId> healthy;
  for (int i = 0; i < 12; ++i) {
    ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
    if (i >= 2) healthy.push_back(id_of(i));
  }
  Reads bad(h, {id_of(0), id_of(1)}, milliseconds(300));
  Reads good(h, healthy, milliseconds(15'000));
  EXPECT_TRUE(good.results->wait());
  EXPECT_EQ(good.results->count(Status::kOk), healthy.size());
  EXPECT_TRUE(eventually([&] { return h.stat("threads_replaced_total") >= 1; }));
  EXPECT_NE(h.stage->health().find("hang"), std::string::npos) << h.stage->health();
  bool named = false;
  for (const auto& line : h.stage->last_errors()) {
    named =
        named || line.find(hung[0]) != std::string::npos || line.find(hung[1]) != std::string::npos;
  }
  EXPECT_TRUE(named) << "the report must name the path";
  release.count_down();
  ASSERT_TRUE(bad.results->wait());
  EXPECT_TRUE(eventually([&] { return h.stat("stuck_threads") == 0; })) << "threads came back";
  EXPECT_EQ(h.stage->health(), "");
}

TEST_P(PosixFaults, ShutdownLeavesHungThreadsBehindWithinItsBound) {
  const TempDir dir;
  auto release = std::make_shared<std::latch>(1);
  auto entered = std::make_shared<std::atomic<bool>>(false);
  auto left = std::make_shared<std::atomic<bool>>(false);
  Region into(small_geometry());
  auto results = std::make_shared<Results>(1);
  {
    Harness h(with(
        dir,
        [release, entered, left](IoStep step, const std::string&, std::size_t&) {
          if (step != IoStep::kRead) return 0;
          *entered = true;
          release->wait();
          *left = true;
          return -EIO;
        },
        GetParam()));
    ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
    const ReadOp op{id_of(1), into.data(), 0, 4, 0, true};
    h.stage->read({&op, 1}, results, in(milliseconds(5'000)));
    ASSERT_TRUE(eventually([&] { return entered->load(); }));
    const auto began = Clock::now();
    h.stage->shutdown(in(milliseconds(200)));
    EXPECT_LT(Clock::now() - began, milliseconds(5'000));
    EXPECT_GE(h.stat("stuck_threads"), 1u);
  }
  EXPECT_FALSE(results->wait(milliseconds(0))) << "its buffer is still in the thread's hands";
  release->count_down();
  // The thread that was left behind still answers, and only then is the buffer free.
  ASSERT_TRUE(results->wait());
  EXPECT_EQ(results->at(0).status, Status::kIoError);
  std::this_thread::sleep_for(milliseconds(50));
}

// Loads never wait behind dumps: with every write blocked a read goes through.
TEST_P(PosixFaults, LoadsDoNotQueueBehindDumps) {
  const TempDir dir;
  std::latch release(1);
  std::atomic<bool> hold{false};
  Harness h(with(
      dir,
      [&](IoStep step, const std::string&, std::size_t&) {
        if (hold && step == IoStep::kOpenWrite) release.wait();
        return 0;
      },
      GetParam()));
  ASSERT_EQ(h.write(id_of(0)).status, Status::kOk);
  hold = true;
  constexpr std::size_t kN = 200;
  std::vector<std::unique_ptr<Region>> from;
  std::vector<WriteOp> ops;
  for (std::size_t i = 0; i < kN; ++i) {
    from.push_back(std::make_unique<Region>(h.geometry, id_of(100 + i)));
    ops.push_back({id_of(100 + i), from.back()->data(), i});
  }
  auto written = std::make_shared<Results>(kN);
  h.stage->write(ops, written, in(milliseconds(30'000)));
  EXPECT_EQ(h.read(id_of(0)).status, Status::kOk);
  EXPECT_EQ(written->count(Status::kOk), 0u);
  release.count_down();
  ASSERT_TRUE(written->wait());
  EXPECT_EQ(written->count(Status::kOk), kN);
}

TEST(PosixFaults, AQueuedOperationTimesOutUntouched) {
  const TempDir dir;
  std::latch release(1);
  auto o = with(
      dir,
      [&](IoStep step, const std::string&, std::size_t&) {
        if (step == IoStep::kOpenRead) release.wait();
        return 0;
      },
      "psync");
  o.read_threads = 1;
  o.stall = milliseconds(60'000);  // nobody comes to help
  Harness h(o);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  Reads first(h, {id_of(0)}, milliseconds(30'000));
  Reads queued(h, {id_of(1), id_of(2)}, milliseconds(100));
  ASSERT_TRUE(queued.results->wait()) << "the watchdog answers when every thread is busy";
  EXPECT_EQ(queued.results->count(Status::kTimeout), 2u);
  for (const auto& region : queued.into) EXPECT_EQ(region->data()[0], std::byte{0xEE});
  release.count_down();
  ASSERT_TRUE(first.results->wait());
  EXPECT_EQ(first.results->at(0).status, Status::kOk);
}

// B27: a process at its file size limit: a short write, then EFBIG. Nothing half-written stays.
TEST(PosixFaults, FileSizeLimit) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  o.engine = "psync";
  Harness h(o);
  ASSERT_EQ(h.write(id_of(0)).status, Status::kOk);
  const auto old = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit tight = before;
  tight.rlim_cur = 16384;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const Outcome failed = h.write(id_of(1));
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old);
  EXPECT_EQ(failed.status, Status::kIoError);
  EXPECT_EQ(failed.error, EFBIG);
  EXPECT_FALSE(h.present(id_of(1)));
  EXPECT_EQ(count_temps(dir.path()), 0u);
  EXPECT_EQ(h.write(id_of(1)).status, Status::kOk);
}

TEST(PosixLookup, SlowAndHungMediaAreBounded) {
  const TempDir dir;
  std::latch release(1);
  std::atomic<int> mode{0};
  auto o = with(dir, [&](IoStep step, const std::string&, std::size_t&) {
    if (step != IoStep::kStat) return 0;
    if (mode == 1) std::this_thread::sleep_for(std::chrono::microseconds(200));
    return 0;
  });
  Harness h(o);
  for (int i = 0; i < 40; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  std::vector<BlockId> ids;
  for (int i = 0; i < 400; ++i) ids.push_back(id_of(i % 2 ? i / 2 % 40 : 1000 + i));
  std::vector<std::uint8_t> present(ids.size());
  mode = 1;  // slow: the rest of the batch goes to helper threads
  h.stage->lookup(ids, present, false);
  for (std::size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(present[i], i % 2) << i;
  ids[300] = id_of(5000);
  for (std::size_t i = 0; i < 300; ++i) ids[i] = id_of(static_cast<int>(i) % 40);
  h.stage->lookup(ids, present, true);
  for (std::size_t i = 0; i < 300; ++i) ASSERT_EQ(present[i], 1) << i;
  ASSERT_EQ(present[300], 0);
  release.count_down();
}

}  // namespace
}  // namespace ucm::posix_test
