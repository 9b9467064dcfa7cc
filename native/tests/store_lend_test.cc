// Lent buffers: objects whose bytes are produced in place and handed over without a copy.
#include <random>
#include <thread>

#include "store_fixture.h"

namespace ucm::test {
namespace {

/// Bytes of a whole object as Rowset would fill them.
void fill(std::byte* data, std::uint32_t object) {
  Rowset source;
  source.add_object(object);
  source.filled();
  const Geometry g = small_geometry();
  for (std::uint32_t s = 0; s < kShards; ++s) {
    std::memcpy(data + g.shard_offset(s), source.memory.data() + s * g.shard_bytes, g.shard_bytes);
  }
}

TEST_F(StoreTest, DonatedBytesAreStoredWithoutACopy) {
  open();
  const Lent lent = store->lend(id_of(1));
  ASSERT_NE(lent.data, nullptr);
  fill(lent.data, 1);
  const auto task = store->donate(id_of(1), lent.handle);
  EXPECT_EQ(wait_durable(*task), all(1, Status::kOk));
  EXPECT_EQ(stat("store.dump_copied_bytes_total"), 0U);
  Rowset target;
  target.add_object(1);
  const auto load = store->load(target.blank().rows());
  EXPECT_EQ(wait(*load), all(kShards, Status::kOk));
  for (std::size_t row = 0; row < target.size(); ++row) EXPECT_TRUE(target.right(row));
  store->give_back(lent.handle);  // late: means nothing any more
  EXPECT_TRUE(present(1));
}

TEST_F(StoreTest, AWriteThatFailsIsTriedAgainFromTheDonatedBuffer) {
  StoreSetup setup;
  setup.store.retry_delay = 1ms;
  open(setup);
  fake->inject(id_of(1), false, Fault::kIoError, 5, 1);
  const Lent lent = store->lend(id_of(1));
  fill(lent.data, 1);
  EXPECT_EQ(wait_durable(*store->donate(id_of(1), lent.handle)), all(1, Status::kOk));
  EXPECT_EQ(stat("store.backend_dump_retries_total"), 1U);
}

TEST_F(StoreTest, CloseDoesNotWaitForLoansAndTheirMemoryStays) {
  open();
  const Lent lent = store->lend(id_of(1));
  const auto begin = Clock::now();
  EXPECT_EQ(store->close(20s), 0U);
  EXPECT_LT(Clock::now() - begin, 5s);
  std::memset(lent.data, 7, small_geometry().object_bytes());
  store->give_back(lent.handle);
  EXPECT_EQ(medium->size(), 0U);
}

TEST_F(StoreTest, LookupOnlyStoresLendNothing) {
  const Store watcher(std::make_shared<FakeStage>(small_geometry(), medium, FakeOptions{}), nullptr,
                      host_device(), {});
  EXPECT_THROW(const_cast<Store&>(watcher).lend(id_of(1)), UnsupportedError);
}

/// Loans, dumps, discards, expiry and loads of a few ids at once: whatever is loaded is right, and no
/// buffer is lost.
TEST_F(StoreTest, LoansAmongEverythingElse) {
  StoreSetup setup;
  setup.store.open_age = 3ms;
  setup.load_buffers = 4;
  setup.shared_buffers = 4;
  open(setup);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(t);
      for (int i = 0; i < 300; ++i) {
        const std::uint32_t object = rng() % 6;
        switch (rng() % 5) {
          case 0:
          case 1: {
            const Lent lent = store->lend(id_of(object));
            if (lent.data == nullptr) break;
            fill(lent.data, object);
            if (rng() % 8 == 0) std::this_thread::sleep_for(5ms);  // it expires
            if (rng() % 4 == 0) {
              std::memset(lent.data, 0, small_geometry().shard_bytes);
              store->give_back(lent.handle);
            } else {
              wait_durable(*store->donate(id_of(object), lent.handle));
            }
            break;
          }
          case 2: {
            Rowset source;
            source.add_object(object);
            wait_durable(*store->dump(source.filled().rows(), 0, CommitMode::kAuto));
            break;
          }
          case 3: {
            const BlockId id = id_of(object);
            rng() % 2 == 0 ? store->discard({&id, 1}) : store->remove({&id, 1});
            break;
          }
          default: {
            Rowset target;
            target.add_object(object);
            const auto task = store->load(target.blank().rows());
            const auto got = wait(*task);
            for (std::size_t row = 0; row < got.size(); ++row) {
              EXPECT_TRUE(got[row] != Status::kOk || target.right(row));
            }
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(eventually([&] { return stat("store.objects_open") == 0; }));
  EXPECT_EQ(stat("store.buffers_lent"), 0U);
  for (std::uint32_t o = 10; o < 14; ++o) {  // every shared buffer is there
    const Lent lent = store->lend(id_of(o));
    ASSERT_NE(lent.data, nullptr);
    store->give_back(lent.handle);
  }
}

}  // namespace
}  // namespace ucm::test
