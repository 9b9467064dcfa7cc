#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include "cache/layout.h"
#include "campaign.h"
#include "checker.h"
#include "settings.h"
#include "stack.h"
#include "worker.h"

namespace ucm::chaos {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

/// Between two looks at the workers; most look means a death. Deaths fall into set-up as well as work.
constexpr std::uint64_t kPaceMicros = 12'000;
constexpr auto kPointPatience = 150ms;

std::int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

/// The segment's file, if there is one.
std::string segment_file(const std::string& directory) {
  std::error_code ec;
  for (const auto& e : fs::directory_iterator(directory, ec)) return e.path();
  return {};
}

class Round {
 public:
  Round(const Plan& plan, Board& board, Tally& tally)
      : plan_(plan), board_(board), tally_(tally), random_(plan.seed) {}

  void run(unsigned kills) {
    board_.mode.store(static_cast<std::uint32_t>(Mode::kWork));
    board_.calm.store(0);
    board_.inspected.store(0);
    board_.clean.store(0);
    for (auto& shape : board_.key) {
      for (auto& key : shape) key.stored.store(0), key.damaged.store(0);
    }
    for (std::uint32_t i = 0; i < plan_.workers; ++i) spawn(i);
    const std::uint64_t goal = tally_.kills() + kills;
    while (tally_.kills() < goal && board_.findings.load() == 0) step();
    set_alien(false);
    drain();
    check_files(plan_, board_);
    sweep();
    if (plan_.slab && !segment_file(plan_.index).empty() && board_.inspected.load() != 0) {
      board_.report("the last process left the slab's index behind: " + segment_file(plan_.index));
    }
  }

 private:
  struct Process {
    pid_t pid = 0;
    Settings settings;
    Clock::time_point born;
  };

  void spawn(std::uint32_t i) {
    Process& p = process_[i];
    p.settings = {};
    p.settings.bug = plan_.bug;
    p.settings.calm = &board_.calm;
    if (random_() % 3 != 0 && !spared(i)) {
      constexpr auto kPoints = static_cast<std::uint64_t>(Point::kCount);
      p.settings.point = static_cast<Point>(1 + random_() % (kPoints - 1));
      p.settings.passage = random_() % 2 == 0 ? 1 : 1 + random_() % 8;
    }
    p.born = Clock::now();
    board_.worker[i].busy_since_ns.store(0);
    board_.worker[i].ready.store(0);
    const std::uint64_t seed = random_();
    p.pid = fork_child([&] { return run_worker(plan_, board_, i, seed, p.settings); });
  }

  static pid_t fork_child(const std::function<int()>& body) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(body());
    return pid;
  }

  /// Looks at one worker; a dead one is accounted for. True while it lives.
  bool alive(std::uint32_t i, bool wait, bool expected) {
    Process& p = process_[i];
    if (p.pid == 0) return false;
    int status = 0;
    pid_t got;
    do {
      got = ::waitpid(p.pid, &status, wait ? 0 : WNOHANG);
    } while (got < 0 && errno == EINTR);
    if (got == 0) return true;
    p.pid = 0;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
      if (expected) {
        ++tally_.kills_by_time;
      } else {
        ++tally_.kills_by_point[static_cast<std::size_t>(p.settings.point)];
      }
    } else if (WIFSIGNALED(status)) {
      board_.report("a worker crashed with signal " + std::to_string(WTERMSIG(status)));
    } else if (WEXITSTATUS(status) != 0) {
      board_.report("a worker ended with status " + std::to_string(WEXITSTATUS(status)));
    }
    return false;
  }

  [[nodiscard]] bool spared(std::uint32_t i) const { return plan_.keeper && i == 0; }

  void kill(std::uint32_t i) {
    if (spared(i) || !alive(i, false, false)) return;
    ::kill(process_[i].pid, SIGKILL);
    (void)alive(i, true, true);
  }

  void step() {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % kPaceMicros));
    const auto what = random_() % 100;
    if (what < 2) {
      for (std::uint32_t i = 0; i < plan_.workers; ++i) kill(i);
      ++tally_.all_at_once;
      if (!plan_.keeper) spoil_dead_segment();
    } else {
      const auto i = static_cast<std::uint32_t>(random_() % plan_.workers);
      // One that is to die at a point gets time to come there.
      const bool waits = process_[i].settings.point != Point::kNone &&
                         Clock::now() - process_[i].born < kPointPatience;
      if (!waits) kill(i);
    }
    for (std::uint32_t i = 0; i < plan_.workers; ++i) {
      if (!alive(i, false, false)) spawn(i);
      check_busy(i);
    }
    if (plan_.full && random_() % 2 == 0) free_some_space();
    if (plan_.flips && random_() % 3 == 0) (void)flip_a_file(plan_, board_, random_);
    if (plan_.clocks && random_() % 4 == 0) {
      board_.add(Count::kClockJumps);
      jump_clocks(plan_, random_);
    }
    if (plan_.aliens) set_alien(random_() % 4 == 0);
  }

  /// As an operator does when a start was refused on a full disk.
  void free_some_space() {
    for (int n = 0; n < 4 && !plan_.slab; ++n) {
      const auto file = some_file(plan_, random_);
      std::error_code ignored;
      if (!file.empty()) fs::remove(file, ignored);
    }
  }

  void check_busy(std::uint32_t i) {
    const std::int64_t since = board_.worker[i].busy_since_ns.load();
    if (since == 0 || now_ns() - since < 2 * kWaitBoundMs * 1'000'000) return;
    board_.report("worker " + std::to_string(i) + " hangs in operation " +
                  std::to_string(board_.worker[i].operation.load()));
    board_.worker[i].busy_since_ns.store(0);
    if (process_[i].pid != 0) ::kill(process_[i].pid, SIGKILL);
  }

  /// A live segment says for a while that another build made it.
  void set_alien(bool on) {
    if (!on && alien_fd_ >= 0) {
      (void)!::pwrite(alien_fd_, &cache::kLayoutVersion, 4,
                      offsetof(cache::Header, layout_version));
      ::close(alien_fd_);
      alien_fd_ = -1;
    }
    if (!on || alien_fd_ >= 0) return;
    const std::string path = segment_file(plan_.shm);
    if (path.empty()) return;
    alien_fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    std::uint32_t version = 0;
    if (alien_fd_ >= 0 &&
        ::pread(alien_fd_, &version, 4, offsetof(cache::Header, layout_version)) == 4 &&
        version == cache::kLayoutVersion) {
      ++version;
      (void)!::pwrite(alien_fd_, &version, 4, offsetof(cache::Header, layout_version));
      ++tally_.aliens;
      return;
    }
    if (alien_fd_ >= 0) ::close(alien_fd_);
    alien_fd_ = -1;
  }

  /// Nobody uses it: whatever its header says, the next process starts with a fresh one.
  void spoil_dead_segment() {
    if (!plan_.flips && !plan_.aliens) return;
    const std::string path = segment_file(plan_.shm);
    if (path.empty()) return;
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    flip(fd, random_() % (8 * sizeof(cache::Header)));
    ++tally_.header_flips;
    ::close(fd);
  }

  static void flip(int fd, std::uint64_t bit) {
    unsigned char c = 0;
    const auto where = static_cast<off_t>(bit / 8);
    if (::pread(fd, &c, 1, where) != 1) return;
    c = static_cast<unsigned char>(c ^ (1U << (bit % 8)));
    (void)!::pwrite(fd, &c, 1, where);
  }

  void drain() {
    board_.calm.store(1);
    for (std::uint32_t i = 0; i < plan_.workers; ++i) {
      if (!alive(i, false, false)) spawn(i);
    }
    // The inspector first has what the others leave.
    for (int i = 0; i < 2000 && board_.worker[0].ready.load() == 0; ++i) {
      std::this_thread::sleep_for(1ms);
    }
    board_.mode.store(static_cast<std::uint32_t>(Mode::kDrain));
    for (std::uint32_t i = 1; i < plan_.workers; ++i) await_end(i);
    if (plan_.flips && plan_.cache) visit_with_flips();
    board_.mode.store(static_cast<std::uint32_t>(Mode::kInspect));
    await_end(0);
    if (!plan_.cache || segment_file(plan_.shm).empty()) return;
    if (board_.inspected.load() != 0) {
      board_.report("the last process left its segment behind: " + segment_file(plan_.shm));
    }
    // All died and nobody came after (a full medium): tools reclaim it.
    const pid_t tool = fork_child([&] { return reclaim_dead_caches(plan_.shm).empty() ? 1 : 0; });
    int status = 0;
    (void)::waitpid(tool, &status, 0);
    if (!segment_file(plan_.shm).empty()) {
      board_.report("a dead segment was not reclaimed: " + segment_file(plan_.shm));
    }
  }

  void await_end(std::uint32_t i) {
    const auto give_up = Clock::now() + std::chrono::milliseconds(3 * kWaitBoundMs);
    while (alive(i, false, false)) {
      if (Clock::now() > give_up) {
        board_.report("worker " + std::to_string(i) + " does not end; operation " +
                      std::to_string(board_.worker[i].operation.load()));
        ::kill(process_[i].pid, SIGKILL);
        (void)alive(i, true, true);
        return;
      }
      std::this_thread::sleep_for(200us);
    }
  }

  /// Bits of the fixed part of a live segment's header flip while only the idle inspector uses it:
  /// whoever comes now is refused in words, or was not concerned. Nobody crashes.
  void visit_with_flips() {
    const std::string path = segment_file(plan_.shm);
    const int fd = path.empty() ? -1 : ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    // By then it sleeps: cleaning up after the dead goes by the numbers in the header.
    for (int i = 0; i < 2 * kWaitBoundMs && board_.clean.load() == 0; ++i) {
      std::this_thread::sleep_for(1ms);
    }
    constexpr std::uint64_t kFixed = offsetof(cache::Header, extent_lock);
    for (int n = 0; n < 6; ++n) {
      const std::uint64_t bit = random_() % (8 * kFixed);
      flip(fd, bit);
      ++tally_.header_flips;
      const pid_t visitor = fork_child([&] { return run_visitor(plan_); });
      int status = 0;
      (void)::waitpid(visitor, &status, 0);
      flip(fd, bit);
      if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        board_.report("attaching to a header with bit " + std::to_string(bit) +
                      " flipped ended with wait status " + std::to_string(status));
      }
    }
    ::close(fd);
  }

  /// The next collector takes away what the dead left behind.
  void sweep() {
    const std::uint64_t left = count_temporaries(plan_.root);
    board_.add(Count::kTemporariesLeft, left);
    if (left == 0 || plan_.slab) return;  // collectors are the layout file's
    const pid_t sweeper = fork_child([&] {
      try {
        auto options = posix_options(plan_, 0, nullptr);
        options.gc.capacity_bytes = 0;
        options.gc.orphan_age = 1ms;
        const auto stage = make_posix_stage(geometry_of(0), options);
        for (int i = 0; i < 50 && count_temporaries(plan_.root) != 0; ++i) {
          std::this_thread::sleep_for(2ms);
          (void)stage->collect_now(2s);
        }
        stage->shutdown(Clock::now() + 2s);
        return 0;
      } catch (const std::exception& e) {
        if (!plan_.full) board_.report(std::string("the sweeper cannot open: ") + e.what());
        return plan_.full ? 0 : 1;
      }
    });
    int status = 0;
    (void)::waitpid(sweeper, &status, 0);
    const std::uint64_t stay = count_temporaries(plan_.root);
    if (stay != 0 && !plan_.full) {
      board_.report(std::to_string(stay) + " of " + std::to_string(left) +
                    " temporaries of the dead stay for ever");
    }
  }

  const Plan& plan_;
  Board& board_;
  Tally& tally_;
  Random random_;
  Process process_[kWorkers];
  int alien_fd_ = -1;
};

}  // namespace

void run_round(const Plan& plan, Board& board, Tally& tally, unsigned kills) {
  Round(plan, board, tally).run(kills);
}

}  // namespace ucm::chaos
