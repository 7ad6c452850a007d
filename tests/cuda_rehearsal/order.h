// Which work happens before which: a clock per stream and one for the host (order.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace rehearsal {

// Of each stream, by its number, how much of its work is known to be done.
using Known = std::vector<uint32_t>;

// Addresses from the first byte of a tensor to behind its last.
struct Range {
  uintptr_t begin = 0;
  uintptr_t end = UINTPTR_MAX;
};

// One piece of a stream's work that has touched memory.
struct Access {
  int stream = -1;
  uint32_t place = 0;
  const char* op = "";
  Range range;
};

// Who has written a block of memory, who has read it since, and from which stream's pool it comes.
struct Accesses {
  int home = -1;
  std::vector<Access> writes;
  std::vector<Access> reads;
  std::vector<int> recorded;  // streams that record_stream has named
};

// One operator on a device's current stream. What it finds is reported when it is destroyed: to report takes the
// interpreter's lock, which a thread may hold that waits for ours.
class Work {
 public:
  Work(int device, const char* op);
  ~Work();
  Work(const Work&) = delete;
  void reads(Accesses* block, Range range);
  void writes(Accesses* block, Range range);

 private:
  void meet(const Access& earlier, const char* did);
  int stream_;
  uint32_t place_;
  const char* op_;
  std::vector<std::string> found_;
};

// Memory that the current stream's pool has given out: whoever had it before may still be at work on that stream.
void given_out(Accesses& block, int device, const char* op);
// Memory that goes back to its stream's pool.
void given_back(const Accesses& block);
void recorded(Accesses* block, int device, int64_t stream);

// The host uses page-locked memory, which a copy may still be using.
void host_uses(Accesses& block, Range range, bool writes, const std::string& op);

void host_waits_for_stream(int device, int64_t stream);
void host_waits_for_device(int device);
void host_waits_for(const Known& event);
Known event_on(int device, int64_t stream);
void stream_waits_for(int device, int64_t stream, const Known& event);
// A copy between two devices is ordered on both streams.
void meet_streams(int one, int other);

}  // namespace rehearsal
