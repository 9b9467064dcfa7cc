// Every interleaving of three processes at one slot of the host cache, with deaths between any two steps:
// no two owners, nothing used without a reference or taken from under a reader; and from whatever state,
// the living can always get to the end, with the object claimable and no reference left.
#include "slot_model.h"

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <unordered_map>

namespace ucm::model {
namespace {

struct Hash {
  std::size_t operator()(const State& s) const noexcept {
    static_assert(std::has_unique_object_representations_v<State>);
    std::uint64_t h = 1469598103934665603ULL;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&s);
    for (std::size_t i = 0; i < sizeof s; ++i) h = (h ^ bytes[i]) * 1099511628211ULL;
    return h;
  }
};

struct Result {
  std::size_t states = 0;
  std::string wrong;  ///< empty: none
};

Result explore(const Scenario& setup) {
  std::unordered_map<State, std::uint32_t, Hash> number;
  std::vector<const State*> states;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> progress;  // from, to
  const auto add = [&](const State& s) {
    const auto [it, fresh] = number.try_emplace(s, static_cast<std::uint32_t>(states.size()));
    if (fresh) states.push_back(&it->first);
    return it->second;
  };
  add(setup.start);
  std::vector<Next> next;
  for (std::uint32_t at = 0; at < states.size(); ++at) {
    if (auto wrong = broken(*states[at]); !wrong.empty()) return {states.size(), std::move(wrong)};
    if (finished(*states[at])) {
      if (auto wrong = unusable(*states[at]); !wrong.empty())
        return {states.size(), std::move(wrong)};
    }
    successors(setup, *states[at], next);
    for (const Next& n : next) {
      const std::uint32_t to = add(n.state);
      if (n.progress) progress.emplace_back(at, to);
    }
  }
  // Backwards from the ends: whoever is not met can never get there by steps that will be taken.
  std::vector<std::uint32_t> first(states.size() + 1), from(progress.size());
  for (const auto& [a, b] : progress) ++first[b + 1];
  for (std::size_t i = 1; i < first.size(); ++i) first[i] += first[i - 1];
  auto place = first;
  for (const auto& [a, b] : progress) from[place[b]++] = a;
  std::vector<bool> ends(states.size());
  std::deque<std::uint32_t> open;
  for (std::uint32_t i = 0; i < states.size(); ++i) {
    if (finished(*states[i])) ends[i] = true, open.push_back(i);
  }
  for (; !open.empty(); open.pop_front()) {
    for (std::uint32_t e = first[open.front()]; e < first[open.front() + 1]; ++e) {
      if (!ends[from[e]]) ends[from[e]] = true, open.push_back(from[e]);
    }
  }
  for (std::uint32_t i = 0; i < states.size(); ++i) {
    bool lives = false;
    for (const Process& p : states[i]->process) lives |= !p.dead;
    if (lives && !ends[i]) return {states.size(), "somebody waits for ever"};
  }
  return {states.size(), ""};
}

Scenario scenario_of(Role a, Role b, Role c, Mutation mutation = Mutation::kNone, int deaths = 2) {
  Scenario s;
  s.roles = {a, b, c};
  s.mutation = mutation;
  s.max_deaths = deaths;
  return s;
}

/// The object is there and nobody uses it.
Scenario with_object(Scenario s, Shard shard = Shard::kReady) {
  s.start.phase = Phase::kObject;
  s.start.shard = shard;
  return s;
}

constexpr Role kL = Role::kLoad, kD = Role::kDump, kE = Role::kEvict;

TEST(SlotModel, EveryInterleavingAndEveryDeath) {
  const Scenario scenarios[] = {
      scenario_of(kL, kL, kL),
      scenario_of(kL, kL, kD),
      scenario_of(kL, kD, kD),
      with_object(scenario_of(kL, kL, kE)),
      with_object(scenario_of(kL, kD, kE)),
      with_object(scenario_of(kL, kL, kD), Shard::kFailed),
      with_object(scenario_of(kL, kL, kE), Shard::kEmpty),
  };
  for (const Scenario& s : scenarios) {
    const Result r = explore(s);
    EXPECT_EQ(r.wrong, "");
    EXPECT_GT(r.states, 1'000u);
    RecordProperty("states", static_cast<int>(r.states));
  }
}

TEST(SlotModel, EveryMistakeIsNoticed) {
  struct Case {
    Scenario scenario;
    const char* name;
  };
  const Case cases[] = {
      {scenario_of(kL, kL, kL, Mutation::kNoWake, 0), "no wake"},
      {scenario_of(kL, kL, kL, Mutation::kAnnounceLate, 0), "announced late"},
      {scenario_of(kL, kL, kL, Mutation::kTakeoverUnchecked), "takeover unchecked"},
      {scenario_of(kL, kL, kL, Mutation::kPinsKept), "pins kept"},
      {with_object(scenario_of(kL, kL, kE, Mutation::kEvictPinned)), "evicts what is pinned"},
      {scenario_of(kL, kL, kL, Mutation::kOrphanForgotten), "orphan forgotten"},
  };
  for (const Case& c : cases) EXPECT_NE(explore(c.scenario).wrong, "") << c.name;
}

}  // namespace
}  // namespace ucm::model
