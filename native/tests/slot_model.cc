#include "slot_model.h"

namespace ucm::model {
namespace {

class Step {
 public:
  Step(const Scenario& scenario, const State& from, std::vector<Next>& out)
      : scenario_(scenario), from_(from), out_(out) {}

  void run() {
    for (int p = 0; p < kProcesses; ++p) {
      if (from_.process[p].dead) continue;
      work(p);
      if (from_.deaths < scenario_.max_deaths) die(p);
    }
    recover();
  }

 private:
  using Change = std::function<void(State&, Process&)>;

  void to(int p, const Change& change, bool progress = true) {
    State s = from_;
    change(s, s.process[static_cast<std::size_t>(p)]);
    out_.push_back({s, progress});
  }
  static std::uint8_t bit(int p) { return static_cast<std::uint8_t>(1U << p); }
  static std::uint8_t name(int p) { return static_cast<std::uint8_t>(p + 1); }
  [[nodiscard]] bool is(Mutation m) const { return scenario_.mutation == m; }
  /// owner_lock.cc, lock: free, or its owner is dead and the lock is broken.
  [[nodiscard]] bool lockable() const {
    return from_.lock == 0 || from_.process[from_.lock - 1U].dead;
  }

  void die(int p) {
    to(
        p,
        [p](State& s, Process& me) {
          me = Process{};
          me.at = At::kDone;
          me.dead = true;
          ++s.deaths;
          // The kernel gives its record locks back: a recovery that it ran is open to others again.
          if (s.recovering != Recovering::kNo && s.recoverer == p) {
            s.recovering = Recovering::kNo;
            s.recoverer = s.victim = s.wake = 0;
            s.concerned = false;
          }
        },
        false);
  }

  static void wake(State& s, int p) { s.process[static_cast<std::size_t>(p)].woken = true; }
  static int lowest(std::uint8_t mask) { return __builtin_ctz(mask); }

  void work(int p) {
    const Process& now = from_.process[static_cast<std::size_t>(p)];
    switch (now.at) {
      case At::kLock:  // tier.cc: claim_load, claim_dump; clock.cc: try_take
        if (!lockable()) return;
        return to(p, [p, this](State& s, Process& me) {
          s.lock = name(p);
          me.at = scenario_.roles[static_cast<std::size_t>(p)] == Role::kEvict ? At::kEvictCheck
                                                                               : At::kPin;
        });
      case At::kPin:  // table_->find, then watch.cc: pin
        return find(p);
      case At::kExamine:  // tier.cc: claim_existing, claim_known_dump
        return examine(p);
      case At::kOwn:  // tier.cc: own, the state after the owner
        return to(p, [](State& s, Process& me) {
          s.shard = Shard::kLoading;
          me.at = At::kUnlock, me.then = At::kRead;
          me.owns = true;
        });
      case At::kUnlock:
        return to(p, [](State& s, Process& me) {
          s.lock = 0;
          me.at = me.then;
          me.then = At::kDone;
          me.referenced = false;
        });
      case At::kTake:  // clock.cc: try_take, with the class's lock
        return take(p);
      case At::kLockFresh:
        if (!lockable()) return;
        return to(p, [p](State& s, Process& me) {
          s.lock = name(p);
          me.at = At::kPrepare;
        });
      case At::kPrepare:  // index.cc: prepare; nobody sees the slot
        return to(p, [p, this](State& s, Process& me) {
          s.waiters = 0;
          s.pins |= bit(p);
          const bool dump = scenario_.roles[static_cast<std::size_t>(p)] == Role::kDump;
          s.owner = dump ? 0 : name(p);
          s.shard = dump ? Shard::kEmpty : Shard::kLoading;
          me.owns = true;
          me.at = At::kLink;
        });
      case At::kLink:  // index.cc: link
        return to(p, [p, this](State& s, Process& me) {
          const bool dump = scenario_.roles[static_cast<std::size_t>(p)] == Role::kDump;
          s.phase = dump ? Phase::kDumping : Phase::kObject;
          me.at = At::kUnlock;
          me.then = dump ? At::kFill : At::kRead;
        });
      case At::kRead:  // the stage answers; tier.cc: finish_load
        for (const Shard result : {Shard::kReady, Shard::kFailed}) {
          to(p, [result](State& s, Process& me) {
            s.shard = result;
            me.owns = false;
            me.reads = result == Shard::kReady;
            me.at = At::kWakeMask;
          });
        }
        return;
      case At::kWakeMask:
        return to(p, [this](State& s, Process& me) {
          me.mask = is(Mutation::kNoWake) ? 0 : s.waiters;
          me.at = me.mask != 0 ? At::kWake : At::kCopy;
        });
      case At::kWake:  // segment.cc: wake
        return to(p, [](State& s, Process& me) {
          const int who = lowest(me.mask);
          wake(s, who);
          me.mask = static_cast<std::uint8_t>(me.mask & (me.mask - 1U));
          if (me.mask == 0) me.at = At::kCopy;
        });
      case At::kAnnounce:  // watch.cc: wait_for
        return to(p, [p, this](State& s, Process& me) {
          s.waiters |= bit(p);
          me.at = At::kSeen;
          if (is(Mutation::kAnnounceLate)) me.then = At::kAnnounce;
        });
      case At::kSeen:  // watch.cc: run, the version before the look
        return to(p, [this](State&, Process& me) {
          me.woken = false;
          // Too late: the state was looked at before it said that it waits, and is not again.
          me.at = me.then == At::kAnnounce ? At::kSleep : At::kCheck;
        });
      case At::kCheck:
        return check(p);
      case At::kSleep:  // futex_wait; after a death the tick ends it too
        if (now.woken || from_.deaths > 0) {
          to(p, [](State&, Process& me) { me.then = At::kDone, me.at = At::kSeen; });
        }
        // The task runs out of time, or is cancelled.
        return to(
            p, [](State&, Process& me) { me.at = At::kUnwait; }, false);
      case At::kHandOn:  // watch.cc: hand_on
        return to(p, [p](State& s, Process& me) {
          me.referenced = (s.waiters & ~bit(p)) != 0;
          me.at = At::kHandOnStore;
        });
      case At::kHandOnStore:
        return to(p, [](State& s, Process& me) {
          if (me.referenced) {
            s.owner = 0;
          } else {
            s.shard = Shard::kFailed;
          }
          me.owns = me.referenced = false;
          me.at = At::kHandOnWake;
        });
      case At::kHandOnWake:
        return to(p, [p](State& s, Process& me) {
          me.mask = static_cast<std::uint8_t>(s.waiters & ~bit(p));
          me.at = me.mask != 0 ? At::kWake : At::kCopy;
        });
      case At::kCopy:
        return to(p, [](State&, Process& me) {
          me.reads = false;
          me.at = At::kUnwait;
        });
      case At::kUnwait:  // watch.cc: unpin
        return to(p, [p](State& s, Process& me) {
          s.waiters &= static_cast<std::uint8_t>(~bit(p));
          me.at = At::kUnpin;
        });
      case At::kUnpin:
        return to(p, [p](State& s, Process& me) {
          s.pins &= static_cast<std::uint8_t>(~bit(p));
          me.at = At::kDone;
        });
      case At::kDumpPhase:  // tier.cc: claim_known_dump, the phase after the owner
        return to(p, [](State& s, Process& me) {
          s.phase = Phase::kDumping;
          me.owns = true;
          me.at = At::kUnlock, me.then = At::kFill;
        });
      case At::kFill:  // shards are copied in; or given up (tier.cc: abort_dump)
        to(p, [](State&, Process& me) { me.at = At::kPublish; });
        return to(p, [](State& s, Process& me) {
          s.phase = s.shard == Shard::kReady ? Phase::kObject : Phase::kGarbage;
          me.owns = false;
          me.at = At::kUnwait;
        });
      case At::kPublish:  // tier.cc: publish
        return to(p, [](State& s, Process& me) {
          s.shard = Shard::kReady;
          me.owns = false;
          me.reads = true;  // the stage below reads from the slot
          me.at = At::kPublishPhase;
        });
      case At::kPublishPhase:
        return to(p, [](State& s, Process& me) {
          s.phase = Phase::kObject;
          me.at = At::kWakeMask;
        });
      case At::kEvictCheck:  // clock.cc: try_take
        return to(p, [p, this](State& s, Process& me) {
          const bool takes = (s.phase == Phase::kObject || s.phase == Phase::kGarbage) &&
                             (s.pins == 0 || is(Mutation::kEvictPinned));
          if (takes) s.slot_owner = name(p);
          me.at = takes ? At::kEvictPhase : At::kUnlock;
          me.then = At::kDone;
        });
      case At::kEvictPhase:
        return to(p, [](State& s, Process& me) {
          s.phase = Phase::kTaken;
          me.at = At::kUnlock, me.then = At::kEvictReset;
        });
      case At::kEvictReset:  // index.cc: prepare, for another id
        return to(p, [](State& s, Process& me) {
          s.waiters = 0, s.owner = 0;
          s.shard = Shard::kEmpty;
          me.at = At::kEvictFree;
        });
      case At::kEvictFree:  // index.cc: give_back
        return to(p, [](State& s, Process& me) {
          s.phase = Phase::kFree;
          me.at = At::kDone;
        });
      case At::kDone:
        return;
    }
  }

  void find(int p) {
    const bool found = from_.phase == Phase::kObject || from_.phase == Phase::kDumping;
    to(p, [=, this](State& s, Process& me) {
      if (!found) {
        me.at = At::kUnlock, me.then = At::kTake;
      } else if (s.phase == Phase::kDumping) {  // a miss, or busy
        me.at = At::kUnlock, me.then = At::kDone;
      } else if (scenario_.roles[static_cast<std::size_t>(p)] == Role::kDump &&
                 s.shard == Shard::kLoading) {
        me.at = At::kUnlock, me.then = At::kDone;
      } else {
        me.referenced = s.pins != 0;
        s.pins |= bit(p);
        me.at = At::kExamine;
      }
    });
  }

  void examine(int p) {
    to(p, [=, this](State& s, Process& me) {
      if (scenario_.roles[static_cast<std::size_t>(p)] == Role::kDump) {
        if (s.shard == Shard::kReady) {
          me.reads = true;
          me.at = At::kUnlock, me.then = At::kCopy;
        } else {
          s.slot_owner = name(p);
          me.at = At::kDumpPhase;
        }
        return;
      }
      const auto wait = [&] {
        me.at = At::kUnlock;
        me.then = At::kAnnounce;
      };
      switch (s.shard) {
        case Shard::kReady:
          me.reads = true;
          me.at = At::kUnlock, me.then = At::kCopy;
          break;
        case Shard::kFailed:
          if (me.referenced) {
            wait();
            break;
          }
          [[fallthrough]];
        case Shard::kEmpty:
          s.owner = name(p);
          me.at = At::kOwn;
          break;
        case Shard::kLoading:
          if (s.owner == 0) {
            s.owner = name(p);
            me.owns = true;
            me.at = At::kUnlock, me.then = At::kRead;
          } else {
            wait();
          }
          break;
      }
    });
  }

  void take(int p) {
    to(p, [p](State& s, Process& me) {
      const bool free = s.phase == Phase::kFree;
      const bool garbage = s.phase == Phase::kGarbage && s.pins == 0;
      if (free || garbage) s.slot_owner = name(p);
      // Taking is exclusive (the class's lock): the two stores follow each other.
      if (free || garbage) s.phase = Phase::kTaken;
      me.at = free || garbage ? At::kLockFresh : At::kDone;  // no room: rejected
    });
  }

  void check(int p) {
    const auto takeover = [&](bool accepted) {
      to(p, [=](State& s, Process& me) {
        s.owner = name(p);
        me.owns = true;
        me.at = accepted ? At::kRead : At::kHandOn;
      });
    };
    switch (from_.shard) {
      case Shard::kReady:
        return to(p, [](State&, Process& me) { me.reads = true, me.at = At::kCopy; });
      case Shard::kFailed:
      case Shard::kEmpty:
        return to(p, [](State&, Process& me) { me.at = At::kUnwait; });
      case Shard::kLoading:
        if (from_.owner == 0 || (is(Mutation::kTakeoverUnchecked) && from_.deaths > 0)) {
          takeover(true);
          return takeover(false);  // its task has ended meanwhile
        }
        return to(p, [](State&, Process& me) { me.at = At::kSleep; });
    }
  }

  // recover.cc. One recovery at a time: with two dead of three there is one to run it.
  void recover() {
    if (from_.recovering == Recovering::kNo) {
      for (int d = 0; d < kProcesses; ++d) {
        if (!from_.process[static_cast<std::size_t>(d)].dead ||
            from_.process[static_cast<std::size_t>(d)].recovered) {
          continue;
        }
        for (int q = 0; q < kProcesses; ++q) {
          if (from_.process[static_cast<std::size_t>(q)].dead) continue;
          to(q, [=](State& s, Process&) {
            s.recovering = Recovering::kBreak;
            s.recoverer = static_cast<std::uint8_t>(q);
            s.victim = static_cast<std::uint8_t>(d);
          });
        }
      }
      return;
    }
    const int q = from_.recoverer, d = from_.victim;
    switch (from_.recovering) {
      case Recovering::kNo:
        return;
      case Recovering::kBreak:
        return to(q, [=](State& s, Process&) {
          if (s.lock == name(d)) s.lock = 0;
          s.recovering = Recovering::kConcern;
        });
      case Recovering::kConcern:
        return to(q, [=](State& s, Process&) {
          const bool moving = s.phase == Phase::kTaken || s.phase == Phase::kDumping;
          const bool concerns = (moving && s.slot_owner == name(d)) || (s.pins & bit(d)) != 0;
          s.recovering = concerns ? Recovering::kLock : Recovering::kWake;
        });
      case Recovering::kLock:
        if (!lockable()) return;
        return to(q, [=](State& s, Process&) {
          s.lock = name(q);
          s.recovering = Recovering::kFix;
        });
      case Recovering::kFix:
        return to(q, [=, this](State& s, Process&) { fix(s, q, d); });
      case Recovering::kTaken:
        return to(q, [](State& s, Process&) {
          s.phase = Phase::kFree;
          s.recovering = Recovering::kWaiters;
        });
      case Recovering::kWaiters:
        return to(q, [=](State& s, Process&) {
          s.waiters &= static_cast<std::uint8_t>(~bit(d));
          s.recovering = Recovering::kPins;
        });
      case Recovering::kPins:
        return to(q, [=, this](State& s, Process&) {
          if (!is(Mutation::kPinsKept)) s.pins &= static_cast<std::uint8_t>(~bit(d));
          s.recovering = Recovering::kUnlock;
        });
      case Recovering::kUnlock:
        return to(q, [](State& s, Process&) {
          s.lock = 0;
          s.recovering = Recovering::kWake;
        });
      case Recovering::kWake:
        return to(q, [=](State& s, Process&) {
          if (s.wake != 0) {
            wake(s, lowest(s.wake));
            s.wake = static_cast<std::uint8_t>(s.wake & (s.wake - 1U));
            return;
          }
          s.process[static_cast<std::size_t>(d)].recovered = true;
          s.recovering = Recovering::kNo;
          s.recoverer = s.victim = 0;
        });
    }
  }

  void fix(State& s, int q, int d) const {
    s.recovering = Recovering::kWaiters;
    const bool its = s.slot_owner == name(d);
    if (its && s.phase == Phase::kTaken) {
      s.phase = Phase::kFree;
    } else if (its && s.phase == Phase::kDumping) {
      if (s.shard == Shard::kReady) {
        s.phase = Phase::kObject;
      } else if ((s.pins & ~bit(d)) == 0) {
        s.slot_owner = name(q);
        s.phase = Phase::kTaken;
        s.recovering = Recovering::kTaken;
      } else {
        s.phase = Phase::kGarbage;
      }
    } else if (s.phase == Phase::kObject && s.shard == Shard::kLoading && s.owner == name(d) &&
               !is(Mutation::kOrphanForgotten)) {
      const auto waiters = static_cast<std::uint8_t>(s.waiters & ~bit(d));
      if (waiters != 0) {
        s.owner = 0;
      } else {
        s.shard = Shard::kFailed;
      }
      s.wake = waiters;
    }
  }

  const Scenario& scenario_;
  const State& from_;
  std::vector<Next>& out_;
};

}  // namespace

void successors(const Scenario& scenario, const State& from, std::vector<Next>& out) {
  out.clear();
  Step(scenario, from, out).run();
}

std::string broken(const State& s) {
  int owners = 0;
  for (int p = 0; p < kProcesses; ++p) {
    const Process& me = s.process[static_cast<std::size_t>(p)];
    if (me.dead) continue;
    owners += me.owns ? 1 : 0;
    const bool pinned = (s.pins >> p & 1) != 0;
    if (me.reads && (s.phase == Phase::kFree || s.phase == Phase::kTaken)) {
      return "the slot is taken while a process reads from it";
    }
    if ((me.reads || me.at == At::kRead || me.at == At::kFill) && !pinned) {
      return "a process uses the slot without a pin";
    }
  }
  return owners > 1 ? "two processes own one shard" : "";
}

bool finished(const State& s) {
  for (const Process& me : s.process) {
    if (me.dead ? !me.recovered : me.at != At::kDone) return false;
  }
  return s.recovering == Recovering::kNo;
}

std::string unusable(const State& s) {
  if (s.pins != 0) return "a reference has leaked";
  if (s.phase == Phase::kTaken || s.phase == Phase::kDumping)
    return "the slot is nobody's and not free";
  if (s.phase == Phase::kObject && s.shard == Shard::kLoading && s.owner != 0) {
    return "the shard is loading for ever";
  }
  if (s.lock != 0 && !s.process[s.lock - 1U].dead) return "a lock is held by nobody";
  return {};
}

}  // namespace ucm::model
