// Search for the fewest threads that are about as fast as any, from how long messages of like sizes took: no threads,
// no clocks, no chance (lane_threads.h).
//
// Numbers that are tried: 1, 2, 3, 4, 6, 8, 12, 16, and the most that there may be. The best of kSamples messages is
// one judgement of a number; judgements of the same one are averaged. Kept is the smallest number that is at most
// kAsFast slower than the fastest one. From there numbers that have not been judged are tried in both directions, until
// one is slower than kWorthOn, its threads wait for cores (kContended), or, upwards, those of the number before do so a
// little (kIdle). After that one of the neighbours is judged again now and then; less and less often while that changes
// nothing, every kMostPause judgements at least. Where a judgement is far from those before (kChanged; the kept
// number's twice in a row, a neighbour's at once), or threads that had a core have none, the machine is another one:
// what is known of other numbers is forgotten. A number whose threads wait for cores is not kept, and half of it is
// used instead: other programs need the cores.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace geartrain {

class TriedThreads {
 public:
  // 1 <= begin <= most.
  TriedThreads(unsigned begin, unsigned most);
  // A message took so long on now() threads; `share` of a core is what they had while they worked, 1 where that is not
  // known.
  void judge(uint64_t bytes, uint64_t took_ns, double share);
  // For the next message.
  unsigned now() const { return numbers_[at_].threads; }

 private:
  struct Number {
    unsigned threads = 0;
    double rate = 0;      // 0: not judged, or forgotten
    double share = 0;     // of a core that each thread had
    uint64_t judged = 0;  // when
  };
  bool usable(size_t number) const;
  void note(double rate, double share);
  void forget_others();
  void halve();
  bool try_another();

  std::array<Number, 9> numbers_{};
  size_t count_ = 0, at_ = 0, kept_ = 0;  // at_ is another than kept_ while that is on trial
  unsigned samples_ = 0, surprises_ = 0;
  double rate_ = 0, share_ = 0;  // the best of the samples
  uint64_t judgements_ = 0;
  uint32_t pause_ = 0, left_ = 0;  // judgements: the last pause before a neighbour, and what is left of it
};

}  // namespace geartrain
