// SPDX-License-Identifier: Apache-2.0
// Shared memory of the running block, and who touched which memory when.
#include <algorithm>
#include <vector>

#include "simt.h"

namespace simt {
namespace {

struct Array {
  const void* tag;
  char* storage;
  std::size_t room, counted;
  std::uint32_t block;  // when it was last declared
};

std::vector<Array> arrays;
alignas(16) char storage[64 << 20];  // zeros stand for elements that nobody wrote
std::size_t used = 0;

}  // namespace

std::string Place::name_and_index() const { return std::string(name) + "[" + std::to_string(index) + "]"; }

void Place::report(const char* what, const Moment& before) const {
  const bool other_block = before.block < block_start();
  fail("race: " + name_and_index() + " was " + what + " by thread " + std::to_string(before.thread) +
       (other_block ? " of another block of the launch" : " and no barrier since"));
}

bool Moment::races_with(const Moment& before, std::uint32_t ordered_until) const {
  if (before.block < ordered_until) return false;
  if (before.block < block_start()) return true;  // of another block
  return before.thread != thread && before.block == block && (!same_warp(before) || before.warp == warp);
}

void fail_outside(const char* name, std::int64_t index, std::int64_t size) {
  fail(Place{name, index, 0, 0}.name_and_index() + " is outside of its " + std::to_string(size) + " elements");
}

void* shared_storage(const void* tag, std::size_t bytes, std::size_t counted) {
  auto found = std::find_if(arrays.begin(), arrays.end(), [&](const Array& a) { return a.tag == tag; });
  if (found == arrays.end()) found = arrays.insert(found, {tag, nullptr, 0, 0, 0});
  if (found->room < bytes) {
    if (used + bytes > sizeof storage) fail("more shared arrays than the harness has room for");
    found->storage = storage + used;
    found->room = bytes;
    used += (bytes + 15) / 16 * 16;
  }
  if (found->block != block_start()) {
    found->block = block_start();
    found->counted = counted;
    std::size_t total = 0;
    for (const Array& array : arrays) total += array.block == block_start() ? array.counted : 0;
    if (total > most_bytes()) {
      fail(std::to_string(total) + " bytes of shared memory, of which the launch has " + std::to_string(most_bytes()));
    }
  }
  return found->storage;
}

void Watch::read(const Place& place) {
  const Moment here = now();
  if (writer_.block < place.written_since) fail(place.name_and_index() + " is read and was never written");
  if (here.races_with(writer_, place.ordered_until)) place.report("written", writer_);
  if (reader_.block != here.block) {
    reader_ = here;
    other_reader_ = {};
    several_ = false;
  } else if (!here.same_warp(reader_)) {
    other_reader_ = here;
  } else {
    several_ = reader_.warp == here.warp && (several_ || reader_.thread != here.thread);
    reader_ = here;
  }
}

void Watch::read_by_tensor_cores(const Place& place) {
  read(place);
  if (fences(writer_.thread) == fences_) {
    fail(place.name_and_index() + " is read by tensor cores, and thread " + std::to_string(writer_.thread) +
         " has passed no fence since it wrote it");
  }
}

void Watch::write(const Place& place) {
  const Moment here = now();
  for (const Moment& reader : {reader_, other_reader_}) {
    if (here.races_with(reader, place.ordered_until)) place.report("read", reader);
  }
  if (here.races_with(writer_, place.ordered_until)) place.report("written", writer_);
  const bool together = reader_.block == here.block && reader_.same_warp(here) && reader_.warp == here.warp;
  if (together && several_) place.report("read", reader_);
  writer_ = here;
  fences_ = fences(here.thread);
}

}  // namespace simt
