// What the health wrapper learns from the Posix stage: errors with their path, hangs, several roots.
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <latch>
#include <stdexcept>

#include "posix_kit.h"
#include "ucm/guard_stage.h"

namespace ucm::posix_test {
namespace {

std::string probe(Harness& h, milliseconds timeout = milliseconds(10'000)) {
  const auto said = h.stage->probe(in(timeout));
  EXPECT_TRUE(said.has_value());
  return said.value_or("no probe");
}

TEST(PosixProbe, LeavesNothingBehind) {
  const TempDir dir;
  Harness h(options_for({dir.str()}));
  EXPECT_EQ(probe(h), "");
  EXPECT_EQ(probe(h), "");
  EXPECT_EQ(count_temps(dir.path()), 0u);
  EXPECT_EQ(h.stat("writes_total"), 0u) << "it is no object";
}

TEST(PosixProbe, NamesStepPathAndErrno) {
  const TempDir dir;
  Harness h(options_for({dir.str() + "/root"}));
  fs::rename(dir.path() / "root", dir.path() / "away");
  EXPECT_EQ(probe(h).find("open " + dir.str() + "/root: ENOENT"), 0u) << probe(h);
  std::ofstream(dir.path() / "root") << "a file";
  EXPECT_NE(probe(h).find("ENOTDIR"), std::string::npos) << probe(h);
  fs::remove(dir.path() / "root");
  ASSERT_EQ(mkfifo((dir.path() / "root").c_str(), 0600), 0);
  EXPECT_NE(probe(h).find("ENOTDIR"), std::string::npos) << probe(h);
  fs::remove(dir.path() / "root");
  fs::create_directory(dir.path() / "root");
  mkfifo((dir.path() / "root" / "ns-test").c_str(), 0600);
  EXPECT_NE(probe(h).find("ENOTDIR"), std::string::npos) << probe(h);
  fs::remove_all(dir.path() / "root");
  fs::rename(dir.path() / "away", dir.path() / "root");
  EXPECT_EQ(probe(h), "");
}

TEST(PosixProbe, AFullMediumStillServes) {
  const TempDir dir;
  auto o = options_for({dir.str()});
  std::atomic<int> error{ENOSPC};
  o.faults = std::make_shared<Faults>(
      [&](IoStep, const std::string&, std::size_t&) { return -error.load(); });
  Harness h(o);
  EXPECT_EQ(probe(h), "");
  error = EDQUOT;
  EXPECT_EQ(probe(h), "");
  error = EROFS;
  EXPECT_NE(probe(h).find("EROFS"), std::string::npos);
  error = EMFILE;
  EXPECT_THROW(probe(h), std::runtime_error) << "says nothing of the medium";
}

/// Holds the first root's steps until it is let go.
struct HungRoot {
  explicit HungRoot(std::string root) : path(std::move(root)) {}
  std::shared_ptr<IoFaults> faults() {
    // By value: a thread that is left behind outlives the test.
    return std::make_shared<Faults>(
        [p = path, g = gate](IoStep, const std::string& at, std::size_t&) {
          if (at == p) g->wait();
          return 0;
        });
  }
  const std::string path;
  const std::shared_ptr<std::latch> gate = std::make_shared<std::latch>(1);
};

TEST(PosixProbe, AHungRootIsTriedOnceAndTheOthersServe) {
  const TempDir bad, good;
  HungRoot hung(bad.str());
  auto o = options_for({bad.str(), good.str()});
  o.faults = hung.faults();
  Harness h(o);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(probe(h, milliseconds(5'000)), "");
  hung.gate->count_down();
}

TEST(PosixProbe, AHungMediumCostsTheProbeItsDeadlineAndShutdownIsBounded) {
  const TempDir dir;
  HungRoot hung(dir.str());
  auto o = options_for({dir.str()});
  o.faults = hung.faults();
  auto h = std::make_unique<Harness>(o);
  EXPECT_EQ(probe(*h, milliseconds(30)), dir.str() + " does not answer");
  EXPECT_EQ(probe(*h, milliseconds(30)), dir.str() + " does not answer");
  const auto start = Clock::now();
  h->stage->shutdown(in(milliseconds(100)));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
  EXPECT_EQ(h->stat("stuck_threads"), 1u);
  hung.gate->count_down();
  h.reset();
}

TEST(PosixProbe, BehindTheGuardALostDirectoryIsAMissAtOnceUntilItIsBack) {
  const TempDir dir;
  const fs::path root = dir.path() / "root";
  Harness h(options_for({root.string()}));
  ASSERT_EQ(h.write(id_of(1)).status, Status::kOk);
  GuardStage guard(h.stage, {milliseconds(5), milliseconds(2000), 4, 2, nullptr});
  const auto look = [&] {
    std::uint8_t present = 9;
    const BlockId id = id_of(1);
    guard.lookup({&id, 1}, {&present, 1}, false);
    return present;
  };
  ASSERT_TRUE(eventually([&] { return guard.stats().at("health_probes_total") >= 4; }));
  EXPECT_EQ(look(), 1);
  fs::rename(root, dir.path() / "away");
  ASSERT_TRUE(eventually([&] { return guard.open(); }));
  EXPECT_NE(guard.health().find(root.string()), std::string::npos);
  EXPECT_EQ(look(), 0);
  fs::rename(dir.path() / "away", root);
  ASSERT_TRUE(eventually([&] { return !guard.open(); }));
  EXPECT_EQ(look(), 1);
}

}  // namespace
}  // namespace ucm::posix_test
