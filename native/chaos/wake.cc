#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "campaign.h"
#include "faults.h"
#include "settings.h"
#include "stack.h"

namespace ucm::chaos {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kObjects = 12;
constexpr int kProcesses = 3;
constexpr auto kRead = 20ms;  // of an object
constexpr auto kTick = 4s;    // far above the bound: only a wake-up ends a wait in time
constexpr auto kBound = 1500ms;

struct Memory {
  Geometry g = geometry_of(0);
  std::vector<std::byte> bytes = std::vector<std::byte>(g.shard_count * g.shard_bytes);
  std::vector<BlockId> ids;
  std::vector<std::uint32_t> shards;
  std::vector<std::uint64_t> addresses;
  explicit Memory(std::uint32_t key) {
    for (std::uint32_t i = 0; i < g.shard_count; ++i) {
      ids.push_back(id_of(0, key));
      shards.push_back(i);
      addresses.push_back(reinterpret_cast<std::uint64_t>(bytes.data() + i * g.shard_bytes));
      fill(bytes.data() + i * g.shard_bytes, 0, key, i, g.shard_bytes);
    }
  }
  [[nodiscard]] Rows rows() const { return {ids, shards, addresses}; }
};

int store_objects(const Plan& plan) {
  Plan bare = plan;
  bare.cache = false;
  const Stack stack(bare, 0, nullptr);
  for (std::uint32_t key = 0; key < kObjects; ++key) {
    const Memory memory(key);
    const auto task = stack.store->dump(memory.rows(), 0, CommitMode::kAuto);
    if (!task->wait_durable_until(Clock::now() + 10s)) return 1;
  }
  return 0;
}

int load_objects(const Plan& plan, Board& board) {
  Settings settings;
  settings.bug = plan.bug;
  settings.tick = kTick;
  arm(settings);
  const Stack stack(plan, 0, std::make_shared<SlowReads>(kRead));
  board.calm.fetch_add(1);  // a barrier: all start together
  while (board.calm.load() < kProcesses) std::this_thread::sleep_for(100us);
  for (std::uint32_t key = 0; key < kObjects && board.findings.load() == 0; ++key) {
    Memory memory(key);
    const auto begun = Clock::now();
    const auto task = stack.store->load(memory.rows());
    (void)task->wait_until(begun + 8s);
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun);
    if (took > kBound)
      board.report("a wait took " + std::to_string(took.count()) + " ms: no wake-up");
    for (std::size_t row = 0; row < memory.ids.size(); ++row) {
      if (task->outcome(row).status != Status::kOk)
        board.report("a row of a shared load is not ok");
    }
  }
  return 0;
}

pid_t child(const std::function<int()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  int status = 2;
  try {
    status = body();
  } catch (...) {
  }
  ::_exit(status);
}

}  // namespace

void run_wake_round(const Plan& plan, Board& board) {
  board.calm.store(0);
  const auto await = [&](pid_t pid) {
    int status = 0;
    (void)::waitpid(pid, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      board.report("a process of a wake round failed");
  };
  await(child([&] { return store_objects(plan); }));
  pid_t loaders[kProcesses];
  for (pid_t& pid : loaders) pid = child([&] { return load_objects(plan, board); });
  for (const pid_t pid : loaders) await(pid);
}

}  // namespace ucm::chaos
