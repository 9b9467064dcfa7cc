#include "settings.h"

#include <signal.h>
#include <unistd.h>

namespace ucm::chaos {
namespace {

Settings g_settings;
std::atomic<std::uint64_t> g_passages{0};

constexpr const char* kPointNames[] = {
    "none",
    "segment_create",
    "segment_attach",
    "segment_leave",
    "segment_retire",
    "class_join",
    "lock_held",
    "slot_taken",
    "slot_prepared",
    "slot_linked",
    "pinned",
    "unpinned",
    "shard_owned",
    "shard_ready",
    "publish_half",
    "publish_unphased",
    "dump_reopened",
    "taken_over",
    "extent_adopted",
    "extent_doubled",
    "extent_ownerless",
    "recovery",
    "temp_created",
    "temp_written",
    "renamed",
    "read_done",
    "collecting",
    "lease_written",
    "root_identity",
};
static_assert(sizeof kPointNames / sizeof *kPointNames == static_cast<std::size_t>(Point::kCount));

constexpr const char* kBugNames[] = {"none",         "no_checksum",     "rename_first",
                                     "missing_wake", "free_referenced", "pins_leak"};
static_assert(sizeof kBugNames / sizeof *kBugNames == static_cast<std::size_t>(Bug::kCount));

}  // namespace

void arm(const Settings& settings) noexcept {
  g_settings = settings;
  g_passages.store(0);
}

const char* point_name(Point point) noexcept { return kPointNames[static_cast<int>(point)]; }
const char* bug_name(Bug bug) noexcept { return kBugNames[static_cast<int>(bug)]; }

void pass(Point point) noexcept {
  if (point != g_settings.point || g_settings.passage == 0) return;
  if (g_settings.calm != nullptr && g_settings.calm->load() != 0) return;
  if (g_passages.fetch_add(1) + 1 == g_settings.passage) ::kill(::getpid(), SIGKILL);
}

bool planted(Bug bug) noexcept { return bug == g_settings.bug; }

std::chrono::milliseconds tick(std::chrono::milliseconds usual) noexcept {
  return g_settings.tick.count() != 0 ? g_settings.tick : usual;
}

}  // namespace ucm::chaos
