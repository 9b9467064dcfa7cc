// Real processes on one directory: killed with SIGKILL, at their file size limit, racing on one key.
// Children are forked before this process has threads of its own and build their own stage.
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <random>
#include <thread>

#include "posix_kit.h"

namespace ucm::posix_test {
namespace {

Geometry large_geometry() { return small_geometry(8, 64 * 1024); }

/// Runs `body` in a child; its return value is the exit status.
pid_t child(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) {
    int status = 120;
    try {
      status = body();
    } catch (...) {
    }
    _exit(status);
  }
  return pid;
}

int exit_status(pid_t pid) {
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Writes `count` of `keys` ids in random order, several in flight; returns how many failed.
int write_many(PosixOptions o, unsigned seed, int count, int keys) {
  Harness h(large_geometry(), std::move(o));
  std::mt19937 random(seed);
  int failed = 0;
  for (int done = 0; done < count;) {
    const int batch = std::min(10, count - done);
    std::vector<std::unique_ptr<Region>> from;
    std::vector<WriteOp> ops;
    for (int i = 0; i < batch; ++i) {
      const BlockId id = id_of(random() % static_cast<unsigned>(keys));
      from.push_back(std::make_unique<Region>(h.geometry, id));
      ops.push_back({id, from.back()->data(), static_cast<std::uint64_t>(i)});
    }
    auto results = std::make_shared<Results>(static_cast<std::size_t>(batch));
    h.stage->write(ops, results, in(milliseconds(30'000)));
    if (!results->wait()) return 119;
    failed += batch - static_cast<int>(results->count(Status::kOk));
    done += batch;
  }
  return failed;
}

/// Every object that lookup calls present must load whole and right. Returns how many there are.
int verify_all(const PosixOptions& o, int keys) {
  Harness h(large_geometry(), o);
  int whole = 0;
  for (int i = 0; i < keys; ++i) {
    if (!h.present(id_of(i))) continue;
    const Outcome outcome = h.read(id_of(i));
    EXPECT_EQ(outcome.status, Status::kOk) << i;
    whole += outcome.status == Status::kOk;
  }
  EXPECT_EQ(h.stat("read_corrupt_total"), 0u);
  return whole;
}

// B30: a dumping process killed 20 times, with a live writer beside it all the time.
TEST(PosixProcesses, KilledWhileDumping) {
  const TempDir dir;
  const auto o = options_for({dir.str()});
  constexpr int kKeys = 400;
  const auto live_temp = dir.path() / "ns-test" / "00" / ".tmp-live-1-1-1";
  const auto objects = [&] {
    return count_files(dir.path(), [](const auto& name) { return name.size() == 32; });
  };
  std::mt19937 random(11);
  int killed = 0;
  for (int round = 0; round < 20; ++round) {
    const pid_t writer = child([&] { return write_many(o, 100 + round, 100'000, kKeys); });
    // Every other one is killed after its first file, the rest anywhere from set-up on.
    if (round % 2 == 0) {
      ASSERT_TRUE(eventually([&] { return objects() > 0; }));
    }
    std::this_thread::sleep_for(milliseconds(random() % 80));
    kill(writer, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(writer, &status, 0), writer);
    killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    // Files that were visible once stay whole; fewer keys, so that every round starts new writes.
    if (round % 6 == 3) {
      std::error_code ignored;
      fs::remove_all(dir.path() / "ns-test", ignored);
    }
  }
  EXPECT_EQ(killed, 20);
  fs::create_directories(live_temp.parent_path());
  {
    std::FILE* f = std::fopen(live_temp.c_str(), "w");
    ASSERT_NE(f, nullptr);
    std::fclose(f);
  }
  EXPECT_GT(verify_all(o, kKeys), 0);

  // A temporary of a killed writer is no hit and goes once it is old; the fresh one stays.
  const auto temps = count_temps(dir.path());
  auto aged = o;
  aged.gc.orphan_age = milliseconds(60'000);
  const auto now = fs::file_time_type::clock::now();
  for (const auto& entry : fs::recursive_directory_iterator(dir.path())) {
    if (entry.path().filename().string().starts_with(".tmp-")) {
      fs::last_write_time(entry.path(), now - std::chrono::seconds(120));
    }
  }
  fs::last_write_time(live_temp, now);
  Harness h(large_geometry(), aged);
  ASSERT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_TRUE(eventually([&] { return count_temps(dir.path()) == 1; })) << temps;
  EXPECT_TRUE(fs::exists(live_temp));
  EXPECT_EQ(h.stat("orphans_removed_total") + 1, temps);
}

// B27: two writers of the same keys, one killed at random and replaced, one at its file size limit,
// and a reader. Whatever is visible is whole and right at every moment.
TEST(PosixProcesses, ConcurrentWritersOfTheSameKeys) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  constexpr int kKeys = 50;
  const pid_t reader = child([&] {
    Harness h(large_geometry(), o);
    for (int n = 0; n < 1000; ++n) {
      const BlockId id = id_of(static_cast<std::uint64_t>(n) % kKeys);
      const bool there = h.present(id);
      Region into(h.geometry);
      const Outcome outcome = h.read(id, into);
      if (outcome.status == Status::kOk && !into.holds(id)) return 1;
      if (outcome.status != Status::kOk && outcome.status != Status::kMiss) return 2;
      if (there && outcome.status != Status::kOk) return 3;  // nothing removes files here
    }
    return 0;
  });
  const pid_t steady = child([&] { return write_many(o, 1, 200, kKeys) == 0 ? 0 : 1; });
  const pid_t limited = child([&] {
    auto sync = o;
    sync.engine = "psync";
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{200'000, 200'000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 100;
    // Fails for every key that the others have not stored yet; success means "already there".
    return write_many(sync, 2, 200, 2 * kKeys) > 0 ? 0 : 1;
  });
  std::mt19937 random(5);
  for (int i = 0; i < 6; ++i) {
    const pid_t victim = child([&] { return write_many(o, 40 + i, 100'000, kKeys); });
    std::this_thread::sleep_for(milliseconds(20 + random() % 100));
    kill(victim, SIGKILL);
    int status = 0;
    waitpid(victim, &status, 0);
  }
  EXPECT_EQ(exit_status(steady), 0);
  EXPECT_EQ(exit_status(limited), 0);
  EXPECT_EQ(exit_status(reader), 0);
  verify_all(o, kKeys);
  Harness h(large_geometry(), o);
  for (int i = kKeys; i < 2 * kKeys; ++i) EXPECT_FALSE(h.present(id_of(i))) << i;
}

// Killed while collecting: what is left is whole, and the next collector goes on at once.
TEST(PosixProcesses, KilledWhileCollecting) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  constexpr int kKeys = 300;
  ASSERT_EQ(exit_status(child([&] {
              Harness h(large_geometry(), o);
              for (int i = 0; i < kKeys; ++i) {
                if (h.write(id_of(i)).status != Status::kOk) return 1;
              }
              return 0;
            })),
            0);
  o.gc.capacity_bytes = 100 * (4096 + large_geometry().object_bytes());
  for (int round = 0; round < 5; ++round) {
    const pid_t collector = child([&] {
      Harness h(large_geometry(), o);
      for (;;) (void)h.stage->collect_now(milliseconds(1'000));
      return 0;
    });
    std::this_thread::sleep_for(milliseconds(20 + 20 * round));
    kill(collector, SIGKILL);
    int status = 0;
    waitpid(collector, &status, 0);
  }
  auto plain = options_for({dir.str()});
  plain.gc.enabled = false;
  verify_all(plain, kKeys);
  Harness h(large_geometry(), o);
  EXPECT_TRUE(h.stage->collect_now(milliseconds(20'000)));
  EXPECT_TRUE(eventually([&] { return h.stat("gc_files") <= 70; })) << h.stat("gc_files");
}

}  // namespace
}  // namespace ucm::posix_test
