// ucm_chaos: processes that share a store are killed at random and at chosen instructions, media and
// clocks misbehave, and afterwards somebody else looks at what is left. docs/chaos.md says what it holds.
//
//   ucm_chaos --seed N --kills N [--bug NAME] [--limit-s N]
//   ucm_chaos --canaries --seed N     every planted bug must be found
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "campaign.h"
#include "settings.h"

namespace ucm::chaos {
namespace {

constexpr unsigned kKillsPerRound = 50;

struct Options {
  std::uint64_t seed = 1;
  std::uint64_t kills = 200;
  std::uint64_t limit_s = 0;
  Bug bug = Bug::kNone;
  bool canaries = false;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--canaries") {
      o.canaries = true;
      continue;
    }
    if (i + 1 >= argc) throw std::invalid_argument("no value for " + name);
    const char* const value = argv[++i];
    if (name == "--seed") {
      o.seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--kills") {
      o.kills = std::strtoull(value, nullptr, 10);
    } else if (name == "--limit-s") {
      o.limit_s = std::strtoull(value, nullptr, 10);
    } else if (name == "--bug") {
      for (int b = 0; b < static_cast<int>(Bug::kCount); ++b) {
        if (std::strcmp(value, bug_name(static_cast<Bug>(b))) == 0) o.bug = static_cast<Bug>(b);
      }
    } else {
      throw std::invalid_argument("unknown option " + name +
                                  "; known: --seed --kills --limit-s --bug --canaries");
    }
  }
  return o;
}

Plan draw(Random& random, Bug bug) {
  Plan plan;
  plan.bug = bug;
  plan.seed = random();
  plan.cache = random() % 4 != 0;
  plan.disk = random() % 6 == 0;
  plan.workers = 2 + static_cast<std::uint32_t>(random() % 3);
  plan.keeper = plan.cache && random() % 4 != 0;
  plan.collect = random() % 3 == 0;
  plan.removes = random() % 4 == 0;
  plan.io_faults = random() % 4 == 0;
  plan.flips = random() % 4 == 0;
  plan.clocks = random() % 4 == 0;
  plan.aliens = plan.cache && random() % 4 == 0;
  plan.full = random() % 6 == 0;
  plan.slab = random() % 4 == 0;
  plan.file_limit = !plan.cache && random() % 3 == 0;
  // A planted bug is looked for where it can do harm.
  if (bug == Bug::kNoChecksum) plan.flips = true, plan.full = false;
  if (bug == Bug::kRenameFirst || bug == Bug::kNoChecksum) plan.slab = false;
  if (bug == Bug::kRenameFirst) plan.flips = false, plan.full = false;
  if (bug == Bug::kFreeReferenced || bug == Bug::kPinsLeak) {
    plan.cache = plan.keeper = true, plan.full = false;
  }
  return plan;
}

void one_round(Random& random, const Options& o, Board& board, Tally& tally, unsigned kills) {
  Plan plan = draw(random, o.bug);
  const char* const tmp = std::getenv("TMPDIR");
  const Place shm("/dev/shm"), index("/dev/shm");
  Place root(plan.disk ? (tmp != nullptr ? tmp : "/tmp") : "/dev/shm");
  if (plan.full) {
    const bool by_inodes = random() % 2 == 0;
    if (!root.mount_small(by_inodes ? 16'384 : 1'200, by_inodes ? 90 : 2'000)) {
      tally.no_mount = std::strerror(errno);
      plan.full = false;
    }
  }
  plan.root = root.path();
  plan.shm = shm.path();
  plan.index = index.path();
  const bool wake = o.bug == Bug::kMissingWake || (o.bug == Bug::kNone && tally.rounds % 8 == 7);
  if (wake) {
    plan.cache = true, plan.disk = plan.slab = false;
    run_wake_round(plan, board);
  } else {
    run_round(plan, board, tally, kills);
    tally.cache_rounds += plan.cache ? 1 : 0;
    tally.slab_rounds += plan.slab ? 1 : 0;
    tally.disk_rounds += plan.disk ? 1 : 0;
    tally.full_rounds += plan.full ? 1 : 0;
  }
  ++tally.rounds;
  if (board.findings.load() != 0) {
    std::printf(
        "round %llu: cache=%d keeper=%d slab=%d disk=%d workers=%u collect=%d removes=%d "
        "io_faults=%d "
        "flips=%d "
        "clocks=%d aliens=%d full=%d file_limit=%d seed=%llu\n",
        static_cast<unsigned long long>(tally.rounds), plan.cache, plan.keeper, plan.slab,
        plan.disk, plan.workers, plan.collect, plan.removes, plan.io_faults, plan.flips,
        plan.clocks, plan.aliens, plan.full, plan.file_limit,
        static_cast<unsigned long long>(plan.seed));
  }
}

void print(const Tally& t, const Board& b, double seconds) {
  const auto row = [](const char* name, std::uint64_t n) {
    std::printf("  %-28s %10llu\n", name, static_cast<unsigned long long>(n));
  };
  std::printf("%llu kills in %llu rounds, %.1f s\n", static_cast<unsigned long long>(t.kills()),
              static_cast<unsigned long long>(t.rounds), seconds);
  row("killed at a random time", t.kills_by_time);
  row("killed at a step of a slab", t.kills_by_point[0]);
  for (std::size_t p = 1; p < t.kills_by_point.size(); ++p) {
    row((std::string("killed at ") + point_name(static_cast<Point>(p))).c_str(),
        t.kills_by_point[p]);
  }
  row("all workers at once", t.all_at_once);
  row("rounds Cache|Posix", t.cache_rounds);
  row("rounds of the layout slab", t.slab_rounds);
  row("rounds on disk", t.disk_rounds);
  row("rounds on a full medium", t.full_rounds);
  constexpr const char* kNames[] = {"dumps",
                                    "loads",
                                    "lookups",
                                    "explicit dumps",
                                    "removals",
                                    "collections",
                                    "attaches",
                                    "attaches refused",
                                    "rows loaded and compared",
                                    "rows missed",
                                    "rows found corrupt",
                                    "rows failed",
                                    "objects not durable",
                                    "steps spoiled",
                                    "bits flipped in files",
                                    "clock jumps",
                                    "shards taken over",
                                    "deaths recovered from",
                                    "files checked",
                                    "blocks inspected",
                                    "temporaries left, then swept"};
  static_assert(sizeof kNames / sizeof *kNames == static_cast<std::size_t>(Count::kCount));
  for (std::size_t c = 0; c < static_cast<std::size_t>(Count::kCount); ++c) {
    row(kNames[c], b.get(static_cast<Count>(c)));
  }
  row("bits flipped in headers", t.header_flips);
  row("segments of another build", t.aliens);
  row("longest call, ms", b.longest_ns.load() / 1'000'000);
  row("findings", b.findings.load());
  if (!t.no_mount.empty()) std::printf("  no small file system: mount: %s\n", t.no_mount.c_str());
  for (std::uint32_t f = 0; f < std::min(b.findings.load(), kFindings); ++f) {
    std::printf("  FOUND %s\n", b.finding[f]);
  }
}

/// True when nothing was found.
bool campaign(const Options& o, bool quiet) {
  Board& board = make_board();
  Tally tally;
  Random random(o.seed);
  const auto begun = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  };
  while (tally.kills() < o.kills && board.findings.load() == 0) {
    if (o.limit_s != 0 && seconds() > static_cast<double>(o.limit_s)) break;
    const auto left = o.kills - tally.kills();
    one_round(random, o, board, tally,
              static_cast<unsigned>(std::min<std::uint64_t>(left, kKillsPerRound)));
    if (o.bug == Bug::kMissingWake && tally.rounds > 3) break;
  }
  if (quiet) {
    std::printf("  %-18s %5llu kills, %5.1f s: %s\n", bug_name(o.bug),
                static_cast<unsigned long long>(tally.kills()), seconds(),
                board.findings.load() != 0 ? board.finding[0] : "NOT FOUND");
  } else {
    print(tally, board, seconds());
  }
  std::fflush(stdout);
  const bool enough = tally.kills() >= o.kills || o.bug != Bug::kNone;
  if (!enough && board.findings.load() == 0) {
    std::printf("the limit of %llu s passed after %llu of %llu kills\n",
                static_cast<unsigned long long>(o.limit_s),
                static_cast<unsigned long long>(tally.kills()),
                static_cast<unsigned long long>(o.kills));
  }
  return board.findings.load() == 0 && enough;
}

/// Each in a process of its own, so that no board is shared.
int canaries(const Options& o) {
  std::printf("planted bugs, each must be found:\n");
  std::fflush(stdout);
  int missed = 0;
  for (int b = 1; b < static_cast<int>(Bug::kCount); ++b) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      Options with = o;
      with.bug = static_cast<Bug>(b);
      with.kills = 400;
      ::_exit(campaign(with, true) ? 1 : 0);
    }
    int status = 0;
    (void)::waitpid(pid, &status, 0);
    missed += WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : 1;
  }
  return missed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ucm::chaos

int main(int argc, char** argv) {
  using namespace ucm::chaos;
  try {
    const Options options = parse(argc, argv);
    return options.canaries ? canaries(options) : (campaign(options, false) ? 0 : 1);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "ucm_chaos: %s\n", e.what());
    return 2;
  }
}
