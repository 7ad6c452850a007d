// A happens-before check without timing: a read before the copy is done, work on the wrong stream, memory that goes back
// to its pool while another stream may still use it.
//
// Everything runs at once here, so nothing is ever seen too early. But what is known of a stream's work follows from
// events and waits alone: each stream has a vector clock, which a kernel's launch, an event and a wait move on as they
// would on a GPU. A block of memory remembers who wrote it last and who has read it since; whoever comes next must know of
// them. Threads of the host count as one: what one has waited for, all know. Of a strided tensor all bytes from the first to the
// last count.
#include "order.h"

#include "device.h"

#include <algorithm>
#include <map>
#include <mutex>

namespace rehearsal {

namespace {

struct Stream {
  int device;
  int64_t id;
  Known known;
};

std::mutex order_lock;
std::map<std::pair<int, int64_t>, int> numbers;
std::vector<Stream> streams;
Known host_known;

int number_of(int device, int64_t id) {
  const auto [found, is_new] = numbers.emplace(std::make_pair(device, id), static_cast<int>(streams.size()));
  if (is_new) {
    streams.push_back({device, id, {}});
  }
  return found->second;
}

uint32_t place_in(const Known& known, int stream) {
  return stream < static_cast<int>(known.size()) ? known[stream] : 0;
}

void learn(Known& known, const Known& other) {
  if (known.size() < other.size()) {
    known.resize(other.size());
  }
  for (size_t i = 0; i < other.size(); ++i) {
    known[i] = std::max(known[i], other[i]);
  }
}

bool knows(const Known& known, const Access& earlier) {
  return earlier.stream < 0 || place_in(known, earlier.stream) >= earlier.place;
}

bool overlap(const Range& one, const Range& other) {
  return one.begin < other.end && other.begin < one.end;
}

// Forget what a write of this range has come after.
void drop_covered(std::vector<Access>& accesses, const Range& range) {
  std::erase_if(accesses, [&](const Access& one) {
    return range.begin <= one.range.begin && one.range.end <= range.end;
  });
}

std::string name_of(int stream) {
  const auto& found = streams[stream];
  return found.id ? "stream " + std::to_string(found.id) : "the default stream";
}

std::string words_of(const Access& earlier, const char* did) {
  return std::string(earlier.op) + " has " + did + " on " + name_of(earlier.stream);
}

void report(const std::vector<std::string>& found) {
  for (const auto& text : found) {
    host->on_note("race", text);
  }
}

}  // namespace

Work::Work(int device, const char* op) : op_(op) {
  const std::lock_guard<std::mutex> held(order_lock);
  stream_ = number_of(device, current_stream(device));
  auto& known = streams[stream_].known;
  learn(known, host_known);
  known.resize(std::max(known.size(), streams.size()));
  place_ = ++known[stream_];
}

Work::~Work() {
  report(found_);
}

void Work::meet(const Access& earlier, const char* did) {
  auto& known = streams[stream_].known;
  if (knows(known, earlier)) {
    return;
  }
  found_.push_back(
      std::string(op_) + " on " + name_of(stream_) + " uses what " + words_of(earlier, did) + ", without waiting for it");
  learn(known, streams[earlier.stream].known);  // once is enough
}

void Work::reads(Accesses* block, Range range) {
  if (block == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> held(order_lock);
  for (const auto& write : block->writes) {
    if (overlap(write.range, range)) {
      meet(write, "written");
    }
  }
  for (auto& read : block->reads) {
    if (read.stream == stream_ && read.range.begin == range.begin && read.range.end == range.end) {
      read.place = place_;
      read.op = op_;
      return;
    }
  }
  block->reads.push_back({stream_, place_, op_, range});
}

void Work::writes(Accesses* block, Range range) {
  if (block == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> held(order_lock);
  for (const auto& write : block->writes) {
    if (overlap(write.range, range)) {
      meet(write, "written");
    }
  }
  for (const auto& read : block->reads) {
    if (overlap(read.range, range) && (read.place != place_ || read.stream != stream_)) {
      meet(read, "read");
    }
  }
  drop_covered(block->writes, range);
  drop_covered(block->reads, range);
  block->writes.push_back({stream_, place_, op_, range});
}

void given_out(Accesses& block, int device, const char* op) {
  const std::lock_guard<std::mutex> held(order_lock);
  block.home = number_of(device, current_stream(device));
  block.writes = {{block.home, place_in(streams[block.home].known, block.home), op, {}}};
}

void given_back(const Accesses& block) {
  std::vector<std::string> found;
  {
    const std::lock_guard<std::mutex> held(order_lock);
    if (block.home < 0) {
      return;
    }
    Known known = streams[block.home].known;
    learn(known, host_known);
    for (const int stream : block.recorded) {  // the allocator waits for what these have been given until now
      learn(known, streams[stream].known);
    }
    const auto look = [&](const Access& last, const char* did) {
      if (!knows(known, last)) {
        found.push_back(
            "memory of " + name_of(block.home) + " is freed while " + words_of(last, did) +
            ", which may not be done: record_stream or a wait is missing");
      }
    };
    for (const auto& write : block.writes) {
      look(write, "written it");
    }
    for (const auto& read : block.reads) {
      look(read, "read it");
    }
  }
  report(found);
}

void recorded(Accesses* block, int device, int64_t stream) {
  if (block != nullptr) {
    const std::lock_guard<std::mutex> held(order_lock);
    block->recorded.push_back(number_of(device, stream));
  }
}

void host_uses(Accesses& block, Range range, bool writes, const std::string& op) {
  std::vector<std::string> found;
  {
    const std::lock_guard<std::mutex> held(order_lock);
    const auto look = [&](const Access& last, const char* did) {
      if (overlap(last.range, range) && !knows(host_known, last)) {
        found.push_back(
            op + " on the host " + (writes ? "overwrites" : "reads") + " page-locked memory that " + words_of(last, did) +
            ", without waiting for it");
        learn(host_known, streams[last.stream].known);
      }
    };
    for (const auto& write : block.writes) {
      look(write, "written");
    }
    if (writes) {
      for (const auto& read : block.reads) {
        look(read, "read");
      }
      drop_covered(block.reads, range);
    }
  }
  report(found);
}

void host_waits_for_stream(int device, int64_t stream) {
  const std::lock_guard<std::mutex> held(order_lock);
  learn(host_known, streams[number_of(device, stream)].known);
}

void host_waits_for_device(int device) {
  const std::lock_guard<std::mutex> held(order_lock);
  for (const auto& stream : streams) {
    if (stream.device == device) {
      learn(host_known, stream.known);
    }
  }
}

void host_waits_for(const Known& event) {
  const std::lock_guard<std::mutex> held(order_lock);
  learn(host_known, event);
}

Known event_on(int device, int64_t stream) {
  const std::lock_guard<std::mutex> held(order_lock);
  auto& known = streams[number_of(device, stream)].known;
  learn(known, host_known);
  return known;
}

void stream_waits_for(int device, int64_t stream, const Known& event) {
  const std::lock_guard<std::mutex> held(order_lock);
  learn(streams[number_of(device, stream)].known, event);
}

void meet_streams(int one, int other) {
  const std::lock_guard<std::mutex> held(order_lock);
  const int first = number_of(one, current_stream(one));
  const int second = number_of(other, current_stream(other));
  learn(streams[first].known, streams[second].known);
  learn(streams[second].known, streams[first].known);
}

}  // namespace rehearsal
