// Collection: what is removed, what never is, who may do it.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <set>
#include <thread>

#include "posix/lease.h"
#include "posix_kit.h"

namespace ucm::posix_test {
namespace {

constexpr std::uint64_t kFile = 4096 + 4 * 8192;  // of small_geometry()

PosixOptions collecting(const TempDir& dir, std::uint64_t files) {
  auto o = options_for({dir.str()});
  o.gc.capacity_bytes = files * kFile;
  o.gc.interval = milliseconds(3'600'000);  // rounds run when a test asks for one
  o.touch_interval = milliseconds(0);
  return o;
}

void set_age(const fs::path& file, std::chrono::seconds age) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const timespec times[2] = {{now.tv_sec - age.count(), 0}, {now.tv_sec - age.count(), 0}};
  ASSERT_EQ(utimensat(AT_FDCWD, file.c_str(), times, 0), 0) << file;
}

fs::path path_of(const TempDir& dir, int i) { return object_path(dir.path(), id_of(i)); }

void fill(Harness& h, const TempDir& dir, int n) {
  for (int i = 0; i < n; ++i) {
    ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
    set_age(path_of(dir, i), std::chrono::seconds(1000 + n - i));  // 0 is the coldest
  }
}

int left(const TempDir& dir, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += fs::exists(path_of(dir, i)) ? 1 : 0;
  return count;
}

TEST(PosixGc, TheColdestGoUntilTheTargetIsMet) {
  const TempDir dir;
  {
    Harness writer(options_for({dir.str()}));
    fill(writer, dir, 100);
  }
  Harness h(collecting(dir, 125));  // 100 files are 0.8 of it; target 0.6, that is 75
  ASSERT_TRUE(eventually([&] { return h.stat("gc_rounds_total") >= 1; }));
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_EQ(left(dir, 100), 75);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(fs::exists(path_of(dir, i)), i >= 25) << i;
  EXPECT_EQ(h.stat("gc_removed_total"), 25u);
  EXPECT_EQ(h.stat("gc_removed_bytes_total"), 25 * kFile);
  EXPECT_EQ(h.stat("gc_used_bytes"), 75 * kFile);
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_EQ(left(dir, 100), 75) << "below the trigger nothing more goes";
}

TEST(PosixGc, ManyPassesWhenMuchMustGo) {
  const TempDir dir;
  {
    Harness writer(options_for({dir.str()}));
    fill(writer, dir, 120);
  }
  auto o = collecting(dir, 30);
  o.gc.recycle = 0.05;
  o.gc.candidate_extra = 0;  // few candidates a pass
  Harness h(o);
  EXPECT_TRUE(eventually(
      [&] { return h.stage->collect_now(milliseconds(20'000)) && left(dir, 120) <= 20; }));
  EXPECT_GE(left(dir, 120), 15);
}

// B32: heat from loads, lookups and touches (what upper tiers and other ranks forward) keeps a block.
TEST(PosixGc, HeatOfEveryKindProtects) {
  for (const bool no_lookup : {false, true}) {
    const TempDir dir;
    {
      Harness writer(options_for({dir.str()}));
      fill(writer, dir, 100);
    }
    auto o = collecting(dir, 1000);
    Harness h(o);
    std::vector<BlockId> oldest;
    for (int i = 0; i < 10; ++i) oldest.push_back(id_of(i));
    for (int i = 0; i < 3; ++i) ASSERT_EQ(h.read(oldest[i]).status, Status::kOk);
    if (!no_lookup) {
      std::vector<std::uint8_t> present(4);
      h.stage->lookup(std::span(oldest).subspan(3, 4), present, false);
      h.stage->touch(std::span(oldest).subspan(7));
    } else {
      h.stage->touch(std::span(oldest).subspan(3));
    }
    ASSERT_TRUE(eventually([&] { return h.stat("touches_total") >= 10; }))
        << h.stat("touches_total");
    h.stage->shutdown(in(milliseconds(5'000)));
    o.gc.capacity_bytes = 125 * kFile;
    Harness collector(o);
    ASSERT_TRUE(collector.stage->collect_now(milliseconds(20'000)));
    EXPECT_LE(left(dir, 100), 90);
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(fs::exists(path_of(dir, i))) << i;
  }
}

TEST(PosixGc, TouchesAreThrottled) {
  const TempDir dir;
  auto o = collecting(dir, 1000);
  o.touch_interval = milliseconds(3'600'000);
  Harness h(o);
  ASSERT_EQ(h.write(id_of(0)).status, Status::kOk);
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(h.present(id_of(0)));
  const BlockId id = id_of(0);
  h.stage->touch({&id, 1});
  set_age(path_of(dir, 0), std::chrono::seconds(7200));
  ASSERT_TRUE(h.present(id_of(0)));
  EXPECT_TRUE(eventually([&] { return h.stat("touches_total") == 1; }));
  struct stat st {};
  ASSERT_EQ(stat(path_of(dir, 0).c_str(), &st), 0);
  EXPECT_GT(st.st_atim.tv_sec, time(nullptr) - 60);
  EXPECT_LT(st.st_mtim.tv_sec, time(nullptr) - 7000) << "only the access time moves";
}

TEST(PosixGc, AtLeastOneGoesWhenTriggered) {
  const TempDir dir;
  auto o = collecting(dir, 6);  // 5 files are 0.83 of it
  o.gc.trigger = 0.8;
  o.gc.recycle = 0.001;
  Harness h(o);
  fill(h, dir, 5);
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_EQ(left(dir, 5), 4);
}

TEST(PosixGc, NothingGoesWithoutACapacity) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  fill(h, dir, 20);
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_EQ(left(dir, 20), 20);
}

// Only objects of marked namespaces are candidates; temporaries never are; odd things do no harm.
TEST(PosixGc, StrangersAreLeftAlone) {
  const TempDir dir;
  {
    Harness writer(options_for({dir.str()}));
    fill(writer, dir, 50);
  }
  const auto other = dir.path() / "operator" / "ab";
  fs::create_directories(other);
  const std::string name = "ab0123456789abcdef0123456789abcd";
  std::ofstream(other / name) << "not ours: no mark in its namespace";
  const auto fanout = path_of(dir, 0).parent_path();
  std::ofstream(fanout / "README") << "hello";
  std::ofstream(fanout / ".tmp-ffffffff-1-00000000-0") << std::string(100, 'x');
  const auto ns = dir.path() / "ns-test";
  std::string misplaced = path_of(dir, 0).filename();
  misplaced[0] = misplaced[0] == 'f' ? '0' : 'f';
  std::ofstream(fanout / misplaced) << "in the wrong fan-out directory";
  ASSERT_EQ(mkfifo((fanout / (std::string(path_of(dir, 0).filename()).substr(0, 31) + "z")).c_str(),
                   0600),
            0);
  fs::path fifo_dir;
  for (int i = 0; i < 256 && fifo_dir.empty(); ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", i);
    if (!fs::exists(ns / two)) fifo_dir = ns / two;
  }
  ASSERT_EQ(mkfifo(fifo_dir.c_str(), 0600), 0);  // B23: a FIFO as a directory entry
  Harness h(collecting(dir, 10));
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_LE(left(dir, 50), 6);
  EXPECT_TRUE(fs::exists(other / name));
  EXPECT_TRUE(fs::exists(fanout / "README"));
  EXPECT_TRUE(fs::exists(fanout / misplaced));
  EXPECT_TRUE(fs::exists(fanout / ".tmp-ffffffff-1-00000000-0")) << "fresh: may have a live writer";
  EXPECT_TRUE(fs::exists(fifo_dir));
}

// B31: everything may vanish while rounds run.
TEST(PosixGc, RoundsSurviveVanishingFiles) {
  const TempDir dir;
  Harness h(collecting(dir, 60));
  std::atomic<bool> stop{false};
  std::thread vandal([&] {
    std::error_code ignored;
    for (int i = 0; !stop; i = (i + 7) % 200) {
      fs::remove(path_of(dir, i), ignored);
      if (i % 13 == 0) fs::remove_all(path_of(dir, i).parent_path(), ignored);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  });
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 20; ++i) ASSERT_EQ(h.write(id_of(round * 20 + i)).status, Status::kOk);
    ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  }
  stop = true;
  vandal.join();
  EXPECT_EQ(h.stat("gc_errors_total"), 0u) << h.stage->last_errors().back();
}

// B30: orphans of dead writers go, temporaries of live ones stay, and count as space in use.
TEST(PosixGc, Orphans) {
  const TempDir dir;
  {
    Harness writer(options_for({dir.str()}));
    fill(writer, dir, 3);
  }
  const auto old_one = path_of(dir, 0).parent_path() / ".tmp-aaaaaaaa-4-00000000-17";
  const auto fresh = path_of(dir, 1).parent_path() / ".tmp-aaaaaaaa-4-00000000-18";
  const auto in_root = dir.path() / ".tmp-aaaaaaaa-4-00000000-gc";
  const auto from_tomorrow = path_of(dir, 2).parent_path() / ".tmp-aaaaaaaa-4-00000000-19";
  for (const auto& p : {old_one, fresh, in_root, from_tomorrow}) {
    std::ofstream(p) << std::string(5000, 't');
  }
  set_age(old_one, std::chrono::seconds(3600));
  set_age(in_root, std::chrono::seconds(3600));
  set_age(from_tomorrow, std::chrono::seconds(-86'400));  // the clock was set back since
  Harness h(options_for({dir.str()}));
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_FALSE(fs::exists(old_one));
  EXPECT_FALSE(fs::exists(in_root));
  EXPECT_FALSE(fs::exists(from_tomorrow));
  EXPECT_TRUE(fs::exists(fresh));
  EXPECT_EQ(h.stat("orphans_removed_total"), 3u);
  EXPECT_EQ(h.stat("gc_temporaries"), 1u);
  EXPECT_EQ(h.stat("gc_used_bytes"), 3 * kFile + 5000);
  EXPECT_EQ(left(dir, 3), 3);
}

// B30: a writer so slow that its temporary was taken for an orphan gets an error or writes again; it
// neither crashes nor claims success without a file.
TEST(PosixGc, AStalledWriterWhoseTemporaryIsGone) {
  for (const int times : {1, 100}) {
    const TempDir dir;
    std::atomic<int> left_to_remove{times};
    auto o = options_for({dir.str()});
    o.faults = std::make_shared<Faults>([&](IoStep step, const std::string& path, std::size_t&) {
      if (step == IoStep::kRename && left_to_remove-- > 0)
        fs::remove(dir.path() / "ns-test" / path);
      return 0;
    });
    Harness h(o);
    const Outcome outcome = h.write(id_of(1));
    if (times == 1) {
      EXPECT_EQ(outcome.status, Status::kOk);
      EXPECT_EQ(h.read(id_of(1)).status, Status::kOk);
      EXPECT_EQ(h.stat("write_restarts_total"), 1u);
    } else {
      EXPECT_EQ(outcome.status, Status::kIoError);
      EXPECT_EQ(outcome.error, ENOENT);
      EXPECT_FALSE(h.present(id_of(1)));
    }
  }
}

TEST(PosixGc, AFullDiskIsCollectedBelowTheTrigger) {
  const TempDir dir;
  std::atomic<bool> full{false};
  auto o = collecting(dir, 1000);
  o.faults = std::make_shared<Faults>([&](IoStep step, const std::string&, std::size_t&) {
    return full && step == IoStep::kWrite ? -ENOSPC : 0;
  });
  Harness h(o);
  fill(h, dir, 40);
  full = true;
  EXPECT_EQ(h.write(id_of(99)).error, ENOSPC);
  EXPECT_TRUE(eventually([&] { return left(dir, 40) == 36; })) << left(dir, 40);
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(fs::exists(path_of(dir, i)));
}

TEST(PosixLease, OneCollectorAndOthersWithEqualSettingsAreWelcome) {
  const TempDir dir;
  Harness first(collecting(dir, 100));
  ASSERT_TRUE(first.stage->collect_now(milliseconds(20'000)));
  Harness second(collecting(dir, 100));
  EXPECT_FALSE(second.stage->collect_now(milliseconds(20'000)));
  EXPECT_EQ(second.stat("gc_is_collector"), 0u);
  EXPECT_EQ(first.stat("gc_is_collector"), 1u);
  first.stage->shutdown(in(milliseconds(5'000)));
  EXPECT_TRUE(second.stage->collect_now(milliseconds(20'000))) << "it takes over";
  EXPECT_EQ(second.stat("gc_is_collector"), 1u);
}

TEST(PosixLease, OtherSettingsAreRefusedWithBothValues) {
  const TempDir dir;
  const auto base = collecting(dir, 100);
  Harness first(base);
  for (int i = 0; i < 4; ++i) {
    auto other = base;
    if (i == 0) other.gc.capacity_bytes = 0;
    if (i == 1) other.gc.trigger = 0.6;
    if (i == 2) other.gc.recycle = 0.2;
    if (i == 3) other.gc.interval = milliseconds(1000);
    try {
      Harness second(other);
      FAIL() << i;
    } catch (const PosixSetupError& e) {
      const std::string message = e.what();
      EXPECT_NE(message.find(posix::settings_text(base.gc)), std::string::npos) << message;
      EXPECT_NE(message.find(posix::settings_text(other.gc)), std::string::npos) << message;
      EXPECT_NE(message.find(dir.str()), std::string::npos) << message;
    }
  }
  auto tool = base;
  tool.gc.enabled = false;
  tool.gc.capacity_bytes = 0;
  Harness reader(tool);  // takes no part, so it cannot disagree
  first.stage->shutdown(in(milliseconds(5'000)));
  auto other = base;
  other.gc.trigger = 0.6;
  Harness later(other);
  EXPECT_TRUE(later.stage->collect_now(milliseconds(20'000)));
}

TEST(PosixLease, ACrashedCollectorIsReplacedAtOnceOnItsHost) {
  const TempDir dir;
  const pid_t child = fork();
  if (child == 0) {
    Harness* h = new Harness(collecting(dir, 100));
    _exit(h->stage->collect_now(milliseconds(20'000)) ? 0 : 1);  // without a shutdown
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ASSERT_TRUE(fs::exists(dir.path() / ".ucm-gc"));
  auto other = collecting(dir, 100);
  other.gc.trigger = 0.5;  // the dead one's settings bind nobody
  Harness h(other);
  EXPECT_TRUE(h.stage->collect_now(milliseconds(20'000)));
}

TEST(PosixLease, ASilentCollectorOfAnotherHostIsReplacedAfterItsTime) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  { Harness first(o); }
  const auto theirs = [&] {
    std::ofstream(dir.path() / ".ucm-gc") << "ucm-gc 1\nowner beefbeef-1-00000000\nboot "
                                             "beefbeef-0000-0000-0000-000000000000\npid_space 1\n"
                                             "pid 1\nstart_ticks 1\nttl_ms 60000\nsettings "
                                          << posix::settings_text(o.gc) << "\n";
  };
  theirs();
  {
    Harness h(o);
    EXPECT_FALSE(h.stage->collect_now(milliseconds(20'000))) << "its heartbeat is fresh";
    set_age(dir.path() / ".ucm-gc", std::chrono::seconds(120));
    EXPECT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  }
  theirs();
  set_age(dir.path() / ".ucm-gc", std::chrono::seconds(-86'400));
  {
    Harness h(o);
    EXPECT_TRUE(h.stage->collect_now(milliseconds(20'000))) << "the clock was set back since";
  }
  std::ofstream(dir.path() / ".ucm-gc") << "garbage";
  Harness h(o);
  EXPECT_TRUE(h.stage->collect_now(milliseconds(20'000))) << "a damaged lease is replaced";
}

TEST(PosixLease, RacersEndWithOneHolder) {
  const TempDir dir;
  { Harness creates(options_for({dir.str()})); }
  constexpr int kRacers = 8;
  std::vector<posix::Identity> who(kRacers);
  std::vector<std::unique_ptr<posix::Lease>> leases;
  for (int i = 0; i < kRacers; ++i) {
    who[i] = posix::Identity::of_this_process();
    who[i].label.append("-").append(std::to_string(i));
    leases.push_back(std::make_unique<posix::Lease>(dir.str(), PosixGcOptions{}, who[i]));
  }
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> held{0};
    std::vector<std::thread> threads;
    for (auto& lease : leases) {
      threads.emplace_back([&held, &lease] { held += lease->hold() == posix::Lease::Held::kYes; });
    }
    for (auto& t : threads) t.join();
    EXPECT_EQ(held, 1);
    for (auto& lease : leases) lease->release();
  }
  EXPECT_EQ(count_temps(dir.path()), 0u);
}

}  // namespace
}  // namespace ucm::posix_test
