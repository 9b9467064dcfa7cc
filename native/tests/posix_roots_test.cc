// Several roots; real full, read-only and foreign-owned file systems (skipped where mounting is not
// allowed).
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <numeric>
#include <thread>

#include "posix_kit.h"

namespace ucm::posix_test {
namespace {

/// A mount that ends with the test.
class Mount {
 public:
  Mount(const fs::path& at, const char* options) : at_(at) {
    fs::create_directories(at);
    ok_ = mount("tmpfs", at.c_str(), "tmpfs", 0, options) == 0;
  }
  ~Mount() {
    if (ok_) umount2(at_.c_str(), MNT_DETACH);
  }
  Mount(const Mount&) = delete;
  Mount& operator=(const Mount&) = delete;
  [[nodiscard]] bool ok() const { return ok_; }

 private:
  fs::path at_;
  bool ok_ = false;
};

PosixOptions three(const TempDir& dir, std::vector<std::string> names = {"a", "b", "c"}) {
  std::vector<std::string> roots;
  for (const auto& n : names) roots.push_back(dir.str() + "/" + n);
  auto o = options_for(roots);
  o.probe_interval = milliseconds(50);
  return o;
}

TEST(PosixRoots, SpreadEvenlyAndReadableInAnyOrder) {
  const TempDir dir;
  constexpr int kN = 300;
  {
    Harness h(three(dir));
    for (int i = 0; i < kN; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  }
  for (const char* n : {"a", "b", "c"}) {
    const auto files =
        count_files(dir.path() / n, [](const auto& name) { return name.size() == 32; });
    EXPECT_GT(files, 60u) << n;
    EXPECT_LT(files, 140u) << n;
  }
  Harness h(three(dir, {"c", "a", "b"}));
  for (int i = 0; i < kN; ++i) ASSERT_EQ(h.read(id_of(i)).status, Status::kOk) << i;
  h.stage->shutdown(in(milliseconds(5'000)));
  fs::rename(dir.path() / "a", dir.path() / "moved");  // another mount point
  Harness moved(three(dir, {"moved", "b", "c"}));
  for (int i = 0; i < kN; ++i) ASSERT_EQ(moved.read(id_of(i)).status, Status::kOk) << i;
}

// B34 at run time: a root vanishes, the others serve, it returns by itself.
TEST(PosixRoots, OneLostTwoServe) {
  const TempDir dir;
  Harness h(three(dir));
  constexpr int kN = 120;
  for (int i = 0; i < kN; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  std::vector<int> lots(kN);
  std::iota(lots.begin(), lots.end(), 0);
  const auto on_b = [&](int i) {
    return fs::exists(object_path(dir.path() / "b", id_of(i))) ||
           fs::exists(object_path(dir.path() / "away", id_of(i)));
  };
  fs::rename(dir.path() / "b", dir.path() / "away");
  std::this_thread::sleep_for(
      milliseconds(1'100));  // handles are compared with paths once a second
  int written = 0;
  int refused = 0;
  for (int i = kN; i < kN + 60; ++i) {
    const Outcome o = h.write(id_of(i));
    (o.status == Status::kOk ? written : refused) += 1;
  }
  EXPECT_GT(written, 20);
  EXPECT_GT(refused, 5);
  EXPECT_EQ(count_files(dir.path() / "away", [](const auto& name) { return name.size() == 32; }),
            static_cast<std::size_t>(std::count_if(lots.begin(), lots.end(), on_b)));
  for (const int i : lots) {
    EXPECT_EQ(h.present(id_of(i)), !on_b(i)) << i;
    EXPECT_EQ(h.read(id_of(i)).status, on_b(i) ? Status::kMiss : Status::kOk) << i;
  }
  EXPECT_NE(h.stage->health().find(dir.str() + "/b"), std::string::npos) << h.stage->health();
  EXPECT_NE(h.stage->health().find("ENOENT"), std::string::npos) << h.stage->health();
  EXPECT_EQ(h.stat("roots_out"), 1u);
  fs::rename(dir.path() / "away", dir.path() / "b");
  ASSERT_TRUE(eventually([&] { return h.stage->health().empty(); })) << h.stage->health();
  for (int i = 0; i < kN; ++i) EXPECT_EQ(h.read(id_of(i)).status, Status::kOk) << i;
  for (int i = kN; i < kN + 60; ++i) EXPECT_EQ(h.write(id_of(i)).status, Status::kOk) << i;
}

// B34: a directory full of FIFOs in place of a root's fan-out.
TEST(PosixRoots, ARootFullOfFifos) {
  const TempDir dir;
  Harness h(three(dir));
  constexpr int kN = 60;
  for (int i = 0; i < kN; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  std::vector<bool> spoiled(kN);
  for (int i = 0; i < kN; ++i) {
    const auto path = object_path(dir.path() / "c", id_of(i));
    if (!fs::exists(path)) continue;
    spoiled[i] = true;
    fs::remove(path);
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  }
  for (int i = 0; i < kN; ++i) {
    EXPECT_EQ(h.present(id_of(i)), !spoiled[i]);
    EXPECT_EQ(h.read(id_of(i)).status, spoiled[i] ? Status::kMiss : Status::kOk) << i;
  }
}

TEST(PosixRoots, AFailingMediumIsTakenOutAndComesBack) {
  const TempDir dir;
  std::atomic<bool> broken{false};
  auto o = three(dir, {"only"});
  o.faults = std::make_shared<Faults>([&](IoStep step, const std::string&, std::size_t&) {
    return broken && (step == IoStep::kRead || step == IoStep::kWrite) ? -EIO : 0;
  });
  o.probe_interval = milliseconds(100'000);  // only the first probe, at once
  Harness h(o);
  for (int i = 0; i < 10; ++i) ASSERT_EQ(h.write(id_of(i)).status, Status::kOk);
  broken = true;
  for (int k = 0; k < 20; ++k) EXPECT_EQ(h.read(id_of(0)).status, Status::kIoError);
  EXPECT_EQ(h.stat("root_outages_total"), 0u) << "one bad file is not a bad medium";
  for (int i = 0; i < 10; ++i) (void)h.read(id_of(i));
  EXPECT_GE(h.stat("root_outages_total"), 1u);
  broken = false;
  ASSERT_TRUE(eventually([&] { return h.stage->health().empty(); }));
  EXPECT_EQ(h.read(id_of(0)).status, Status::kOk);
}

TEST(PosixRoots, ALostMountIsNotWrittenTo) {
  const TempDir dir;
  const auto at = dir.path() / "mnt";
  auto m = std::make_unique<Mount>(at, "size=8m");
  if (!m->ok()) GTEST_SKIP() << "mounting is not allowed here";
  auto o = options_for({at.string()});
  o.probe_interval = milliseconds(50);
  Harness h(o);
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  m.reset();  // unmounted under us: an empty directory on the disk below is left
  for (int i = 2; i < 12; ++i) EXPECT_NE(h.write(id_of(i)).status, Status::kOk);
  (void)h.stage->collect_now(milliseconds(5'000));  // nor by the collector
  EXPECT_TRUE(fs::is_empty(at)) << "nothing may be written to the disk below the mount";
  EXPECT_NE(h.stage->health().find("ESTALE"), std::string::npos) << h.stage->health();
}

// ENOSPC by bytes and by inodes on a real small file system.
TEST(PosixFull, BytesAndInodes) {
  for (const char* limit : {"size=2m", "size=64m,nr_inodes=60"}) {
    const TempDir dir;
    Mount m(dir.path() / "small", limit);
    if (!m.ok()) GTEST_SKIP() << "mounting is not allowed here";
    auto o = options_for({dir.str() + "/small"});
    o.gc.capacity_bytes = 1u << 30;
    o.gc.interval = milliseconds(3'600'000);
    Harness h(o);
    int ok = 0;
    int full = 0;
    for (int i = 0; i < 100; ++i) {
      const Outcome outcome = h.write(id_of(i));
      if (outcome.status == Status::kOk) {
        ++ok;
      } else {
        ++full;
        EXPECT_EQ(outcome.error, ENOSPC) << limit;
      }
    }
    EXPECT_GT(ok, 10) << limit;
    EXPECT_GT(full, 0) << limit;
    EXPECT_EQ(count_temps(dir.path()), 0u) << limit;
    for (const auto& line : h.stage->last_errors()) {
      if (line.find("ENOSPC") == std::string::npos) continue;
      EXPECT_NE(line.find("/small/"), std::string::npos);
    }
    EXPECT_TRUE(eventually([&] { return h.stat("gc_removed_total") > 0; })) << "kicked by ENOSPC";
    std::size_t whole = 0;
    for (int i = 0; i < 100; ++i) {
      if (h.present(id_of(i))) whole += h.read(id_of(i)).status == Status::kOk;
    }
    EXPECT_GT(whole, 0u);
    EXPECT_EQ(h.stat("read_corrupt_total"), 0u);
  }
}

TEST(PosixSetupRefused, ReadOnlyMount) {
  const TempDir dir;
  const auto at = dir.path() / "ro";
  Mount m(at, "size=1m");
  if (!m.ok()) GTEST_SKIP() << "mounting is not allowed here";
  ASSERT_EQ(mount("tmpfs", at.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr), 0);
  try {
    Harness h(three(dir, {"good", "ro"}));
    FAIL();
  } catch (const PosixSetupError& e) {
    EXPECT_EQ(e.error(), EROFS);
    EXPECT_NE(std::string(e.what()).find(at.string()), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("EROFS"), std::string::npos) << e.what();
  }
}

TEST(PosixSetupRefused, SomebodyElsesDirectory) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to become another user";
  const TempDir dir;
  fs::permissions(dir.path(), fs::perms(0755));
  const pid_t child = fork();
  if (child == 0) {
    if (setuid(65534) != 0) _exit(2);
    try {
      Harness h(options_for({dir.str()}));
    } catch (const PosixSetupError& e) {
      _exit(e.error() == EACCES && std::string(e.what()).find(dir.str()) != std::string::npos ? 0
                                                                                              : 3);
    }
    _exit(4);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
}

}  // namespace
}  // namespace ucm::posix_test
