// Engine memory on a device: what is waited for, proven on a driver that does everything late, and on the
// real one where there is one.
#include "ucm/cuda_device.h"

#include <dlfcn.h>

#include <algorithm>

#include "store_fixture.h"

namespace ucm::test {
namespace {

using DevicePtr = unsigned long long;
constexpr const char* kReal = "libcuda.so.1";

/// The driver as the engine uses it: allocations, producers, events. Loaded from the same library.
struct Engine {
  explicit Engine(const std::string& path) : library(::dlopen(path.c_str(), RTLD_NOW)) {
    if (library == nullptr) return;
    load("cuCtxPushCurrent_v2", push);
    load("cuCtxPopCurrent_v2", pop);
    load("cuCtxSynchronize", synchronize);
    load("cuDevicePrimaryCtxRetain", retain);
    load("cuDevicePrimaryCtxRelease_v2", release);
    load("cuInit", init);
    load("cuMemAlloc_v2", alloc);
    load("cuMemFree_v2", free);
    load("cuMemsetD8Async", memset_async);
    load("cuMemcpyHtoD_v2", to_device);
    load("cuMemcpyDtoH_v2", to_host);
    load("cuStreamCreate", stream_create);
    load("cuStreamDestroy_v2", stream_destroy);
    load("cuEventCreate", event_create);
    load("cuEventDestroy_v2", event_destroy);
    load("cuEventRecord", event_record);
    set = reinterpret_cast<decltype(set)>(::dlsym(library, "stub_set"));
    reset = reinterpret_cast<decltype(reset)>(::dlsym(library, "stub_reset"));
    calls = reinterpret_cast<decltype(calls)>(::dlsym(library, "stub_calls"));
    live = reinterpret_cast<decltype(live)>(::dlsym(library, "stub_live"));
  }
  template <class F>
  void load(const char* symbol, F& out) {
    out = reinterpret_cast<F>(::dlsym(library, symbol));
  }
  void* library;
  int (*init)(unsigned) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*release)(int) = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int (*synchronize)() = nullptr;
  int (*alloc)(DevicePtr*, std::size_t) = nullptr;
  int (*free)(DevicePtr) = nullptr;
  int (*memset_async)(DevicePtr, unsigned char, std::size_t, void*) = nullptr;
  int (*to_device)(DevicePtr, const void*, std::size_t) = nullptr;
  int (*to_host)(void*, DevicePtr, std::size_t) = nullptr;
  int (*stream_create)(void**, unsigned) = nullptr;
  int (*stream_destroy)(void*) = nullptr;
  int (*event_create)(void**, unsigned) = nullptr;
  int (*event_destroy)(void*) = nullptr;
  int (*event_record)(void*, void*) = nullptr;
  // The stub's own; null with the real driver.
  void (*set)(const char*, long) = nullptr;
  void (*reset)() = nullptr;
  const char* (*calls)() = nullptr;
  long (*live)(const char*) = nullptr;
};

constexpr std::size_t kScratch = 256u << 20;

class CudaTest : public StoreTest {
 protected:
  void begin(const std::string& library) {
    path = library;
    engine = std::make_unique<Engine>(library);
    ASSERT_NE(engine->library, nullptr);
    if (stub()) engine->reset();
    ASSERT_EQ(engine->init(0), 0);
    ASSERT_EQ(engine->retain(&context, 0), 0);
    engine->push(context);
    engine->stream_create(&stream, 1);
    engine->event_create(&event, 2);
    if (stub()) {
      engine->set("delay_us", 3000);
    }
    ASSERT_EQ(engine->alloc(&scratch, stub() ? 64 : kScratch), 0);
    device = open_cuda_device({0, library});
  }
  void TearDown() override {
    if (engine == nullptr || engine->library == nullptr) return;
    if (stub()) engine->reset();  // knobs off, then whatever a test left running ends
    engine->synchronize();
    store.reset();
    tier.reset();
    device.reset();
    for (const DevicePtr p : allocated) engine->free(p);
    if (scratch != 0) engine->free(scratch);
    engine->event_destroy(event);
    engine->stream_destroy(stream);
    void* popped = nullptr;
    engine->pop(&popped);
    engine->release(0);
    if (stub()) {
      EXPECT_EQ(engine->live("streams"), 0);
      EXPECT_EQ(engine->live("registered"), 0);
      EXPECT_EQ(engine->live("contexts"), 0);
    }
  }
  [[nodiscard]] bool stub() const { return engine->set != nullptr; }
  void open_store(StoreOptions options = {}, Geometry geometry = small_geometry()) {
    store.reset();
    fake = std::make_shared<FakeStage>(geometry, medium, FakeOptions{});
    tier = std::make_shared<StagingTier>(geometry, 8, 24);
    store = std::make_unique<Store>(fake, tier, device, options);
  }
  DevicePtr allocate(std::size_t bytes, unsigned char value) {
    DevicePtr p = 0;
    EXPECT_EQ(engine->alloc(&p, bytes), 0);
    allocated.push_back(p);
    const std::vector<std::byte> fill(bytes, std::byte{value});
    EXPECT_EQ(engine->to_device(p, fill.data(), bytes), 0);
    return p;
  }
  std::vector<std::byte> fetch(DevicePtr p, std::size_t bytes) {
    std::vector<std::byte> out(bytes);
    EXPECT_EQ(engine->to_host(out.data(), p, bytes), 0);
    return out;
  }
  /// A kernel of the engine: writes `value` some time after it was queued.
  void produce(DevicePtr p, std::size_t bytes, unsigned char value) {
    const std::size_t busy = stub() ? 64 : kScratch;
    for (int i = 0; i < 20; ++i) {
      engine->memset_async(scratch, static_cast<unsigned char>(i), busy, stream);
    }
    engine->memset_async(p, value, bytes, stream);
  }
  std::uint64_t event_name() const { return reinterpret_cast<std::uintptr_t>(event); }
  /// Rows of one object whose shards lie one after another from `p`.
  struct OneObject {
    std::vector<BlockId> ids;
    std::vector<std::uint32_t> shards;
    std::vector<std::uint64_t> addresses;
    Rows rows() const { return {ids, shards, addresses}; }
  };
  OneObject object_at(std::uint32_t number, DevicePtr p) {
    const Geometry& g = store->geometry();
    const RunShape& shape = g.runs[0];
    const std::uint64_t run = shape.count == 1 ? shape.bytes : shape.count * shape.stride;
    OneObject out;
    for (std::uint32_t s = 0; s < g.shard_count; ++s) {
      out.ids.push_back(id_of(number));
      out.shards.push_back(s);
      for (std::uint32_t r = 0; r < g.runs_per_shard; ++r) {
        out.addresses.push_back(p + (s * g.runs_per_shard + r) * run);
      }
    }
    return out;
  }
  /// First byte of the stored object; what was dumped decides it.
  int stored_byte(std::uint32_t number) {
    const auto object = medium->get(id_of(number));
    return object ? static_cast<int>(object->data[0]) : -1;
  }
  std::vector<std::string> calls() {
    std::vector<std::string> out;
    std::string line;
    for (const char c : std::string(engine->calls())) {
      if (c != '\n') {
        line += c;
      } else {
        out.push_back(std::move(line));
        line.clear();
      }
    }
    return out;
  }
  static std::size_t first(const std::vector<std::string>& calls, const std::string& name) {
    return static_cast<std::size_t>(std::find(calls.begin(), calls.end(), name) - calls.begin());
  }

  static constexpr std::size_t kObject = std::size_t{kShards} * kRuns * kRunBytes;
  std::string path;
  std::unique_ptr<Engine> engine;
  std::shared_ptr<Device> device;
  std::vector<DevicePtr> allocated;
  void* context = nullptr;
  void* stream = nullptr;
  void* event = nullptr;
  DevicePtr scratch = 0;
};

/// On both drivers.
class CudaOnAnyDriver : public CudaTest, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    const std::string library = GetParam();
    if (library == kReal && ::dlopen(kReal, RTLD_NOW) == nullptr) {
      GTEST_SKIP() << "no libcuda.so.1 on this machine";
    }
    begin(library);
  }
};
INSTANTIATE_TEST_SUITE_P(Drivers, CudaOnAnyDriver, ::testing::Values(UCM_STUB_CUDA, kReal),
                         [](const auto& given) {
                           return std::string(given.param) == kReal ? "real" : "stub";
                         });

TEST_P(CudaOnAnyDriver, WhatWasDumpedIsLoaded) {
  open_store();
  std::vector<std::byte> content(kObject);
  for (std::size_t i = 0; i < kObject; ++i) content[i] = static_cast<std::byte>(i * 7 + i / 251);
  const DevicePtr from = allocate(kObject, 0);
  engine->to_device(from, content.data(), kObject);
  const auto dump = store->dump(object_at(1, from).rows(), 0, CommitMode::kAuto);
  ASSERT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
  const DevicePtr to = allocate(kObject, 0xEE);
  OneObject wanted = object_at(1, to);
  wanted.addresses[3] = 0;  // skipped
  const auto load = store->load(wanted.rows());
  ASSERT_EQ(wait(*load), all(kShards, Status::kOk));
  const auto got = fetch(to, kObject);
  for (std::size_t i = 0; i < kObject; ++i) {
    const bool skipped = i / kRunBytes == 3;
    ASSERT_EQ(got[i], skipped ? std::byte{0xEE} : content[i]) << i;
  }
}

TEST_P(CudaOnAnyDriver, StridedRunsKeepWhatLiesBetween) {
  constexpr std::uint64_t kPiece = 64, kCount = 10, kStride = 256;
  const Geometry g{kShards, kRuns * kPiece * kCount, kRuns, {{kPiece, kCount, kStride}}, ""};
  open_store({}, g);
  const std::size_t bytes = kShards * kRuns * kCount * kStride;
  std::vector<std::byte> content(bytes);
  for (std::size_t i = 0; i < bytes; ++i) content[i] = static_cast<std::byte>(i * 13 + i / 509);
  const DevicePtr from = allocate(bytes, 0);
  engine->to_device(from, content.data(), bytes);
  const auto dump = store->dump(object_at(1, from).rows(), 0, CommitMode::kAuto);
  ASSERT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
  const DevicePtr to = allocate(bytes, 0xEE);
  const auto load = store->load(object_at(1, to).rows());
  ASSERT_EQ(wait(*load), all(kShards, Status::kOk));
  const auto got = fetch(to, bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    ASSERT_EQ(got[i], i % kStride < kPiece ? content[i] : std::byte{0xEE}) << i;
  }
}

TEST_P(CudaOnAnyDriver, ADumpReadsWhatTheEventStandsFor) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x11);
  produce(source, kObject, 0x77);
  engine->event_record(event, stream);
  const auto task = store->dump(object_at(1, source).rows(), event_name(), CommitMode::kAuto);
  ASSERT_EQ(wait_durable(*task), all(kShards, Status::kOk));
  EXPECT_EQ(stored_byte(1), 0x77);
}

TEST_P(CudaOnAnyDriver, ALoadWritesAfterTheEvent) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x55);
  const auto dump = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  ASSERT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
  const DevicePtr to = allocate(kObject, 0xEE);
  produce(to, kObject, 0x77);  // a kernel of an earlier step still writes there
  engine->event_record(event, stream);
  const auto load = store->load(object_at(1, to).rows(), event_name());
  ASSERT_EQ(wait(*load), all(kShards, Status::kOk));
  engine->synchronize();
  EXPECT_EQ(fetch(to, kObject), std::vector<std::byte>(kObject, std::byte{0x55}));
}

TEST_P(CudaOnAnyDriver, WithoutEventsADumpWaitsForTheWholeDevice) {
  StoreOptions options;
  options.synchronize_dumps = true;
  open_store(options);
  const DevicePtr source = allocate(kObject, 0x11);
  produce(source, kObject, 0x77);
  const auto task = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  ASSERT_EQ(wait_durable(*task), all(kShards, Status::kOk));
  EXPECT_EQ(stored_byte(1), 0x77);
}

TEST_P(CudaOnAnyDriver, AWaitingDumpIsGivenUpAtOnce) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x11);
  if (stub()) engine->set("delay_us", 300'000);
  produce(source, kObject, 0x77);
  engine->event_record(event, stream);
  const auto task = store->dump(object_at(1, source).rows(), event_name(), CommitMode::kAuto);
  const auto start = Clock::now();
  task->give_up(Status::kCancelled);
  if (stub()) {
    EXPECT_LT(Clock::now() - start, 200ms) << "the fence does not wait for the event";
  }
  for (const Status s : statuses(*task)) EXPECT_EQ(s, Status::kCancelled);
  EXPECT_EQ(stored_byte(1), -1);
}

TEST_P(CudaOnAnyDriver, BuffersArePinnedFromStartToClose) {
  open_store();
  const std::uint64_t bytes = small_geometry().object_bytes() * 32;
  EXPECT_EQ(stat("cuda:0.pinned_bytes"), bytes);
  EXPECT_EQ(store->health().count("cuda:0"), 0u);
  if (stub()) {
    EXPECT_EQ(engine->live("registered_bytes"), static_cast<long>(bytes));
  }
  store->close(10s);
  EXPECT_EQ(stat("cuda:0.pinned_bytes"), 0u);
  if (stub()) {
    EXPECT_EQ(engine->live("registered"), 0);
  }
}

TEST_P(CudaOnAnyDriver, WhatCannotBeOpenedSaysWhy) {
  const auto refused = [](CudaOptions options) {
    try {
      (void)open_cuda_device(options);
    } catch (const DeviceError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(refused({99, path}).find("cuda:99: cuDeviceGet"), std::string::npos);
  EXPECT_NE(refused({0, "/nowhere/libcuda.so"}).find("/nowhere/libcuda.so"), std::string::npos);
  EXPECT_NE(refused({0, "libm.so.6"}).find("libm.so.6 has no cuInit"), std::string::npos);
  EXPECT_EQ(open_cuda_device({0, path}), device) << "one object per device";
}

/// On the stub alone: what each guard is good for, and what happens when the driver fails.
class CudaOnStub : public CudaTest {
 protected:
  void SetUp() override { begin(UCM_STUB_CUDA); }
  int dumped(std::uint64_t name) {
    open_store();
    const DevicePtr source = allocate(kObject, 0x11);
    produce(source, kObject, 0x77);
    engine->event_record(event, stream);
    const auto task = store->dump(object_at(1, source).rows(), name, CommitMode::kAuto);
    EXPECT_EQ(wait_durable(*task), all(kShards, Status::kOk));
    return stored_byte(1);
  }
  /// Device memory at the moment the result of a load was told, looked at behind the driver's back.
  bool loaded_in_time() {
    open_store();
    const DevicePtr source = allocate(kObject, 0x55);
    const auto dump = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
    EXPECT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
    const DevicePtr to = allocate(kObject, 0xEE);
    engine->set("early_sync", early_sync);
    const auto load = store->load(object_at(1, to).rows());
    EXPECT_EQ(wait(*load), all(kShards, Status::kOk));
    return *reinterpret_cast<const volatile unsigned char*>(to + kObject - 1) == 0x55;
  }
  long early_sync = 0;
};

TEST_F(CudaOnStub, TheControlSeesWrongBytesWithoutTheEvent) { EXPECT_EQ(dumped(0), 0x11); }

TEST_F(CudaOnStub, TheWaitOnTheStreamAloneIsEnough) {
  engine->set("query_lies", 1);
  EXPECT_EQ(dumped(event_name()), 0x77);
}

TEST_F(CudaOnStub, TheQuestionToTheEventAloneIsEnough) {
  engine->set("ignore_wait", 1);
  EXPECT_EQ(dumped(event_name()), 0x77);
}

TEST_F(CudaOnStub, TheControlSeesWrongBytesWithoutBoth) {
  engine->set("query_lies", 1);
  engine->set("ignore_wait", 1);
  EXPECT_EQ(dumped(event_name()), 0x11);
}

TEST_F(CudaOnStub, ALoadIsCompleteWhenItsResultIsTold) { EXPECT_TRUE(loaded_in_time()); }

TEST_F(CudaOnStub, TheControlSeesAnIncompleteLoadWithoutTheSynchronisation) {
  early_sync = 1;
  EXPECT_FALSE(loaded_in_time());
}

TEST_F(CudaOnStub, TheControlSeesAnIncompleteDumpWithoutTheSynchronisation) {
  engine->set("early_sync", 1);
  EXPECT_NE(dumped(event_name()), 0x77);
}

TEST_F(CudaOnStub, TheControlSeesALoadOverwrittenWithoutTheEvent) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x55);
  const auto dump = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  ASSERT_EQ(wait_durable(*dump), all(kShards, Status::kOk));
  const DevicePtr to = allocate(kObject, 0xEE);
  produce(to, kObject, 0x77);
  const auto load = store->load(object_at(1, to).rows());
  ASSERT_EQ(wait(*load), all(kShards, Status::kOk));
  engine->synchronize();
  EXPECT_EQ(fetch(to, kObject), std::vector<std::byte>(kObject, std::byte{0x77}));
}

TEST_F(CudaOnStub, CallsComeInOrder) {
  ASSERT_EQ(dumped(event_name()), 0x77);
  const auto made = calls();
  const std::size_t retain = first(made, "cuDevicePrimaryCtxRetain");
  const std::size_t pin = first(made, "cuMemHostRegister");
  const std::size_t wait_event = first(made, "cuStreamWaitEvent");
  const std::size_t copy = first(made, "cuMemcpyDtoHAsync");
  const std::size_t synchronize = first(made, "cuStreamSynchronize");
  EXPECT_LT(retain, pin);
  EXPECT_LT(pin, wait_event);
  EXPECT_LT(wait_event, copy);
  EXPECT_LT(copy, synchronize);
  EXPECT_LT(synchronize, made.size());
  store.reset();
  const auto after = calls();
  EXPECT_LT(synchronize, first(after, "cuMemHostUnregister"));
  EXPECT_LT(first(after, "cuMemHostUnregister"), after.size());
}

TEST_F(CudaOnStub, AFailedCopyFailsItsRowsAndStoresNothing) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x11);
  engine->set("fail:cuMemcpyDtoHAsync", 700);
  auto task = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kIoError));
  EXPECT_EQ(statuses(*task), all(kShards, Status::kIoError));
  EXPECT_EQ(task->outcome(0).error, EFAULT);
  EXPECT_EQ(stored_byte(1), -1);
  EXPECT_NE(store->health().at("cuda:0").find("CUDA_ERROR_ILLEGAL_ADDRESS 700 (an illegal memory"),
            std::string::npos);
  EXPECT_EQ(stat("store.copy_errors_total"), kShards);
  engine->set("fail:cuMemcpyDtoHAsync", 0);
  task = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kOk)) << "nothing of the first is left";

  const DevicePtr to = allocate(kObject, 0xEE);
  engine->set("fail:cuMemcpyHtoDAsync", 2);
  const auto load = store->load(object_at(1, to).rows());
  EXPECT_EQ(wait(*load), all(kShards, Status::kIoError));
  EXPECT_EQ(load->outcome(0).error, ENOMEM);
  EXPECT_TRUE(eventually([&] { return stat("staging.buffers_free") == stat("staging.buffers"); }));
}

TEST_F(CudaOnStub, AFailedSynchronisationFailsTheRows) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x11);
  engine->set("fail:cuStreamSynchronize", 719);
  const auto task = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kIoError));
  EXPECT_EQ(task->outcome(0).error, EIO);
}

TEST_F(CudaOnStub, WithoutAStreamNothingIsCalledCopied) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x11);
  engine->set("fail:cuStreamCreate", 2);
  const auto task = store->dump(object_at(1, source).rows(), 0, CommitMode::kAuto);
  EXPECT_EQ(wait_durable(*task), all(kShards, Status::kIoError));
  EXPECT_NE(store->health().at("cuda:0").find("cuStreamCreate"), std::string::npos);
}

TEST_F(CudaOnStub, AnUnknownEventIsRefused) {
  open_store();
  const DevicePtr source = allocate(kObject, 0x11);
  EXPECT_THROW((void)store->dump(object_at(1, source).rows(), 12345, CommitMode::kAuto),
               std::invalid_argument);
}

TEST_F(CudaOnStub, WithoutPinningItStillWorksAndSaysSo) {
  engine->set("fail:cuMemHostRegister", 2);
  EXPECT_EQ(dumped(event_name()), 0x77);
  EXPECT_NE(store->health().at("cuda:0").find("not pinned (cuMemHostRegister: CUDA_ERROR_OUT_OF"),
            std::string::npos);
}

TEST_F(CudaOnStub, MemorySharedByTwoStoresIsPinnedOnceAndAsLongAsOneNeedsIt) {
  open_store();
  auto other =
      std::make_unique<Store>(std::make_shared<FakeStage>(small_geometry(), medium, FakeOptions{}),
                              tier, device, StoreOptions{});
  EXPECT_EQ(engine->live("registered"), 1);
  store->close(10s);
  EXPECT_EQ(engine->live("registered"), 1);
  other.reset();
  EXPECT_EQ(engine->live("registered"), 0);
}

TEST_F(CudaOnStub, OneStreamPerCopyingThread) {
  StoreOptions options;
  options.copiers = 3;
  open_store(options);
  const DevicePtr source = allocate(kObject, 0x11);
  for (std::uint32_t round = 0; round < 10; ++round) {
    std::vector<std::shared_ptr<Task>> tasks;
    for (std::uint32_t n = 0; n < 6; ++n) {
      tasks.push_back(store->dump(object_at(round * 6 + n, source).rows(), 0, CommitMode::kAuto));
    }
    for (const auto& task : tasks) ASSERT_EQ(wait_durable(*task), all(kShards, Status::kOk));
  }
  EXPECT_LE(stat("cuda:0.streams"), 3u);
}

}  // namespace
}  // namespace ucm::test
