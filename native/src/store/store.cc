// The public face: checks arguments, groups rows by object, asks tier and stage.
#include "ucm/store.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "store/core.h"
#include "ucm/keep.h"

namespace ucm {
namespace {

constexpr std::size_t kFirstLookup = 64;  // ids of the first batch of a prefix lookup; doubles
constexpr std::size_t kMaxLookup = 4096;

void check_ids(std::span<const BlockId> ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i].empty()) {
      throw std::invalid_argument("store: ids[" + std::to_string(i) +
                                  "] is all zero: an empty id names nothing and is never stored");
    }
  }
}

void check_rows(const Rows& rows, const Geometry& geometry) {
  if (rows.shards.size() != rows.ids.size() ||
      rows.addresses.size() != rows.ids.size() * geometry.runs_per_shard) {
    throw std::invalid_argument("store: " + std::to_string(rows.ids.size()) + " ids, " +
                                std::to_string(rows.shards.size()) + " shards, " +
                                std::to_string(rows.addresses.size()) +
                                " addresses; expected one shard and " +
                                std::to_string(geometry.runs_per_shard) + " addresses per id");
  }
  check_ids(rows.ids);
  for (std::size_t i = 0; i < rows.shards.size(); ++i) {
    if (rows.shards[i] >= geometry.shard_count) {
      throw std::invalid_argument("store: shards[" + std::to_string(i) + "] is " +
                                  std::to_string(rows.shards[i]) + "; objects have " +
                                  std::to_string(geometry.shard_count) + " shards, from 0");
    }
  }
}

struct Group {
  std::uint32_t begin;
  std::uint32_t end;
  std::uint32_t first_row;
};

/// Order of work so that ranks that want the same start with different parts of it.
std::vector<Group> rotated(const std::vector<Group>& groups, Rotation rotation) {
  const std::size_t ranks = rotation.ranks;
  if (ranks <= 1) return groups;
  std::vector<Group> out;
  out.reserve(groups.size());
  for (std::size_t k = 0; k < ranks; ++k) {
    for (std::size_t i = (rotation.rank + k) % ranks; i < groups.size(); i += ranks) {
      out.push_back(groups[i]);
    }
  }
  return out;
}

/// Fewer objects than ranks: each object's shards are dealt out, so that every rank can fetch.
std::vector<Group> dealt(std::vector<std::uint32_t>& order,
                         const std::vector<std::uint32_t>& shards, const std::vector<Group>& groups,
                         std::uint32_t ranks) {
  std::vector<Group> out;
  for (const Group& g : groups) {
    const auto slice = [&](std::uint32_t row) { return shards[row] % ranks; };
    std::stable_sort(order.begin() + g.begin, order.begin() + g.end,
                     [&](std::uint32_t a, std::uint32_t b) { return slice(a) < slice(b); });
    for (std::uint32_t begin = g.begin; begin < g.end;) {
      std::uint32_t end = begin + 1;
      while (end < g.end && slice(order[end]) == slice(order[begin])) ++end;
      out.push_back({begin, end, g.first_row});
      begin = end;
    }
  }
  return out;
}

/// Fill task.order and task.units: one unit per object, in order of the objects' first rows.
/// Throws when `unique` and a shard of an object is named twice.
void group_rows(TaskImpl& task, Rotation rotation, bool unique) {
  const std::size_t n = task.ids.size();
  auto& order = task.order;
  order.resize(n);
  std::iota(order.begin(), order.end(), 0U);
  const auto before = [&](std::uint32_t a, std::uint32_t b) {
    if (const auto c = task.ids[a] <=> task.ids[b]; c != 0) return c < 0;
    return task.shards[a] < task.shards[b];
  };
  std::stable_sort(order.begin(), order.end(), before);
  std::vector<Group> groups;
  for (std::uint32_t pos = 0; pos < n; ++pos) {
    const std::uint32_t row = order[pos];
    if (pos == 0 || task.ids[order[pos - 1]] != task.ids[row]) {
      groups.push_back({pos, pos + 1, row});
      continue;
    }
    Group& group = groups.back();
    group.end = pos + 1;
    group.first_row = std::min(group.first_row, row);
    if (unique && task.shards[order[pos - 1]] == task.shards[row]) {
      throw std::invalid_argument("store: rows " + std::to_string(order[pos - 1]) + " and " +
                                  std::to_string(row) + " dump the same shard " +
                                  std::to_string(task.shards[row]) + " of one object");
    }
  }
  std::sort(groups.begin(), groups.end(),
            [](const Group& a, const Group& b) { return a.first_row < b.first_row; });
  if (rotation.ranks > 1) {
    if (groups.size() < rotation.ranks) groups = dealt(order, task.shards, groups, rotation.ranks);
    groups = rotated(groups, rotation);
  }
  task.units = std::vector<Unit>(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) {
    task.units[i].id = task.ids[order[groups[i].begin]];
    task.units[i].begin = groups[i].begin;
    task.units[i].end = groups[i].end;
  }
}

}  // namespace

Store::Store(std::shared_ptr<Stage> below, std::shared_ptr<HostTier> tier,
             std::shared_ptr<Device> device, StoreOptions options) {
  if (below == nullptr || device == nullptr)
    throw std::invalid_argument("store: no stage or device");
  const Geometry& g = below->geometry();
  if (g.shard_count == 0 || g.shard_bytes == 0 || g.runs.empty() ||
      g.runs_per_shard % g.runs.size() != 0 || g.shard_bytes != g.total_of_runs()) {
    throw std::invalid_argument("store: shard_bytes is " + std::to_string(g.shard_bytes) +
                                ", but " + std::to_string(g.runs_per_shard) + " runs in " +
                                std::to_string(g.runs.size()) + " shapes are " +
                                std::to_string(g.runs.empty() ? 0 : g.total_of_runs()));
  }
  if (tier != nullptr && (tier->geometry().shard_count != g.shard_count ||
                          tier->geometry().shard_bytes != g.shard_bytes)) {
    throw std::invalid_argument("store: " + tier->name() + " and " + below->name() +
                                " have different geometries");
  }
  core_ =
      std::make_shared<StoreCore>(std::move(below), std::move(tier), std::move(device), options);
  core_->start();
}

Store::~Store() {
  if (core_ == nullptr) return;
  if (::getpid() != core_->pid) {
    keep_forever(std::move(core_));  // after fork: the threads to join do not exist here
    return;
  }
  const std::uint64_t stuck = core_->close(std::chrono::seconds(10));
  if (stuck != 0 || core_.use_count() > 1) {
    // Somebody below still holds the sinks: they (and the stage) must not die on a stage's thread.
    keep_forever(std::move(core_));
  }
}

const Geometry& Store::geometry() const noexcept { return core_->geometry; }

void Store::lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present) {
  core_->check_usable();
  check_ids(ids);
  if (ids.size() != present.size()) throw std::invalid_argument("store: lookup spans disagree");
  lookup_some(ids, present, false);
}

void Store::lookup_some(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                        bool stop_at_first_miss) const {
  std::fill(present.begin(), present.end(), std::uint8_t{0});
  if (core_->tier == nullptr || !core_->tier->retains()) {
    core_->below->lookup(ids, present, stop_at_first_miss);
    return;
  }
  core_->tier->lookup(ids, present);
  std::vector<BlockId> missing;
  std::vector<std::size_t> at;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (present[i] != 0) continue;
    missing.push_back(ids[i]);
    at.push_back(i);
  }
  if (missing.empty()) return;
  std::vector<std::uint8_t> found(missing.size(), 0);
  core_->below->lookup(missing, found, stop_at_first_miss);
  for (std::size_t i = 0; i < found.size(); ++i) present[at[i]] = found[i];
}

std::int64_t Store::lookup_on_prefix(std::span<const BlockId> ids) {
  core_->check_usable();
  check_ids(ids);
  std::vector<std::uint8_t> present(std::min(ids.size(), kMaxLookup));
  std::size_t batch = kFirstLookup;
  for (std::size_t done = 0; done < ids.size(); batch = std::min(batch * 2, kMaxLookup)) {
    const std::size_t n = std::min(batch, ids.size() - done);
    const std::span<std::uint8_t> here(present.data(), n);
    lookup_some(ids.subspan(done, n), here, true);
    for (std::size_t i = 0; i < n; ++i) {
      if (here[i] == 0) return static_cast<std::int64_t>(done + i) - 1;
    }
    done += n;
  }
  return static_cast<std::int64_t>(ids.size()) - 1;
}

std::int64_t Store::lookup_on_reverse(std::span<const BlockId> ids) {
  core_->check_usable();
  check_ids(ids);
  std::vector<std::uint8_t> present(std::min(ids.size(), kMaxLookup));
  std::size_t batch = kFirstLookup;
  for (std::size_t left = ids.size(); left > 0; batch = std::min(batch * 2, kMaxLookup)) {
    const std::size_t n = std::min(batch, left);
    left -= n;
    const std::span<std::uint8_t> here(present.data(), n);
    lookup_some(ids.subspan(left, n), here, false);
    for (std::size_t i = n; i > 0; --i) {
      if (here[i - 1] != 0) return static_cast<std::int64_t>(left + i - 1);
    }
  }
  return -1;
}

void Store::prefetch(std::span<const BlockId> ids) {
  core_->check_usable();
  check_ids(ids);
  if (!core_->moves_data() || !core_->tier->retains() || ids.empty()) return;
  std::vector<std::uint8_t> present(ids.size(), 0);
  core_->tier->lookup(ids, present);
  const std::uint32_t shard_count = core_->geometry.shard_count;
  const auto absent = static_cast<std::size_t>(std::count(present.begin(), present.end(), 0));
  const std::size_t taken = std::min(absent, core_->prefetch_room());
  core_->counters->prefetch_dropped_objects += absent - taken;
  if (taken == 0) return;
  const auto task = core_->new_task(TaskKind::kLoad, taken * shard_count);
  for (std::size_t i = 0; i < ids.size() && task->ids.size() < task->size(); ++i) {
    if (present[i] != 0) continue;
    for (std::uint32_t s = 0; s < shard_count; ++s) {
      task->ids.push_back(ids[i]);
      task->shards.push_back(s);
    }
  }
  group_rows(*task, core_->tier->rotation(), false);
  task->io.assign(task->ids.size(), Io::kNone);
  core_->submit_load(task);
}

void Store::touch(std::span<const BlockId> ids) {
  core_->check_usable();
  check_ids(ids);
  if (core_->tier != nullptr) core_->tier->touch(ids);
  core_->below->touch(ids);
}

std::shared_ptr<Task> Store::load(const Rows& rows, std::uint64_t event) {
  core_->check_usable();
  if (!core_->moves_data()) throw UnsupportedError("this store only looks up: it cannot load");
  check_rows(rows, core_->geometry);
  const auto task = core_->new_task(TaskKind::kLoad, rows.ids.size());
  core_->set_event(*task, event);
  task->ids.assign(rows.ids.begin(), rows.ids.end());
  task->shards.assign(rows.shards.begin(), rows.shards.end());
  task->addresses.assign(rows.addresses.begin(), rows.addresses.end());
  task->io.assign(rows.ids.size(), Io::kNone);
  group_rows(*task, core_->tier->rotation(), false);
  if (!rows.ids.empty()) core_->submit_load(task);
  return task;
}

std::shared_ptr<Task> Store::dump(const Rows& rows, std::uint64_t event, CommitMode mode) {
  core_->check_usable();
  if (!core_->moves_data()) throw UnsupportedError("this store only looks up: it cannot dump");
  check_rows(rows, core_->geometry);
  const auto zero = std::find(rows.addresses.begin(), rows.addresses.end(), std::uint64_t{0});
  if (zero != rows.addresses.end()) {
    const auto at = static_cast<std::size_t>(zero - rows.addresses.begin());
    throw std::invalid_argument("store: address 0 in row " +
                                std::to_string(at / core_->geometry.runs_per_shard) + ", run " +
                                std::to_string(at % core_->geometry.runs_per_shard) +
                                ": a dump needs every run of a shard (0 means \"skip\" only on "
                                "load); nothing was submitted");
  }
  const auto task = core_->new_task(TaskKind::kDump, rows.ids.size());
  core_->set_event(*task, event);
  task->mode = mode;
  task->ids.assign(rows.ids.begin(), rows.ids.end());
  task->shards.assign(rows.shards.begin(), rows.shards.end());
  task->addresses.assign(rows.addresses.begin(), rows.addresses.end());
  group_rows(*task, {}, true);
  if (!rows.ids.empty()) core_->submit_dump(task);
  return task;
}

std::shared_ptr<Task> Store::commit(std::span<const BlockId> ids) {
  core_->check_usable();
  if (!core_->moves_data()) throw UnsupportedError("this store only looks up: it cannot commit");
  check_ids(ids);
  const auto task = core_->new_task(TaskKind::kCommit, ids.size());
  task->ids.assign(ids.begin(), ids.end());
  task->shards.assign(ids.size(), 0);
  task->order.resize(ids.size());
  std::iota(task->order.begin(), task->order.end(), 0U);
  task->units = std::vector<Unit>(ids.size());
  for (std::uint32_t i = 0; i < ids.size(); ++i) {
    task->units[i].id = ids[i];
    task->units[i].begin = i;
    task->units[i].end = i + 1;
  }
  if (ids.empty()) return task;
  const std::vector<std::uint32_t> not_open = core_->submit_commit(task);
  if (not_open.empty()) return task;
  // They were perhaps stored before they were dumped again, or published by AUTO: ask.
  std::vector<BlockId> asked;
  asked.reserve(not_open.size());
  for (const std::uint32_t row : not_open) asked.push_back(ids[row]);
  std::vector<std::uint8_t> stored(asked.size(), 0);
  lookup_some(asked, stored, false);
  for (std::size_t i = 0; i < not_open.size(); ++i) {
    if (stored[i] != 0) task->finish_durable(not_open[i], {Status::kOk, 0});
    task->finish_open(not_open[i], {stored[i] != 0 ? Status::kOk : Status::kMiss, 0});
  }
  return task;
}

void Store::discard(std::span<const BlockId> ids) {
  core_->check_usable();
  check_ids(ids);
  core_->discard(ids);
}

Lent Store::lend(const BlockId& id) {
  core_->check_usable();
  if (!core_->moves_data()) throw UnsupportedError("this store only looks up: it lends no buffers");
  check_ids({&id, 1});
  return core_->lend(id);
}

std::shared_ptr<Task> Store::donate(const BlockId& id, std::uint64_t handle) {
  core_->end_loan(handle, true);
  return commit({&id, 1});
}

void Store::give_back(std::uint64_t handle) noexcept {
  if (::getpid() == core_->pid) core_->end_loan(handle, false);
}

void Store::remove(std::span<const BlockId> ids) {
  core_->check_usable();
  check_ids(ids);
  if (core_->tier != nullptr) core_->tier->remove(ids);
  core_->below->remove(ids);
}

std::map<std::string, std::uint64_t> Store::stats() const {
  std::map<std::string, std::uint64_t> out;
  if (::getpid() != core_->pid) core_->check_usable();
  core_->counters->add_to(out);
  core_->gauges(out);
  const auto merge = [&](const std::string& name, const std::map<std::string, std::uint64_t>& in) {
    for (const auto& [key, value] : in) out[name + "." + key] = value;
  };
  if (core_->tier != nullptr) merge(core_->tier->name(), core_->tier->stats());
  merge(core_->below->name(), core_->below->stats());
  merge(core_->device->name(), core_->device->stats());
  return out;
}

std::map<std::string, std::string> Store::health() const {
  if (::getpid() != core_->pid) core_->check_usable();
  std::map<std::string, std::string> out;
  if (core_->tier != nullptr) out[core_->tier->name()] = core_->tier->health();
  out[core_->below->name()] = core_->below->health();
  if (std::string device = core_->device_health(); !device.empty()) {
    out[core_->device->name()] = std::move(device);
  }
  return out;
}

std::uint64_t Store::close(std::chrono::milliseconds timeout) {
  if (::getpid() != core_->pid) core_->check_usable();
  return core_->close(timeout);
}

}  // namespace ucm
