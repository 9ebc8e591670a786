// Internal to selection: form of the descent and number of searches in flight, chosen by what large draws of this
// process were measured to take.
//
// Every form and number gives the same rows, so what is measured is work that was asked for: until a choice is made,
// large draws from large populations go in pieces, each under the next candidate. The widest form with kUsualInFlight
// searches stays the choice unless another's best piece was faster by a tenth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace geartrain {

// Enough draws at once to keep the memory system busy.
constexpr size_t kUsualInFlight = 64, kMostInFlight = 256;

// Any thread.
class DrawTuning {
 public:
  struct Candidate {
    const char* form;
    size_t in_flight;
    double ns_per_draw = 0;  // of its fastest piece; 0: not measured
  };
  // Draws of a piece, and rows from which draws wait for memory rather than for the processor.
  static constexpr size_t kPiece = 512;
  static constexpr uint64_t kRowsFrom = uint64_t{1} << 20;

  // How many searches go at once in a draw of so many; asks for no measurement.
  static size_t in_flight();

  // Calls draw_piece(first, last, in_flight) until [0, draws) is done, and measures where nothing is chosen yet.
  template <typename DrawPiece>
  static void in_pieces(uint64_t rows, size_t draws, DrawPiece draw_piece) {
    size_t first = 0;
    for (; rows >= kRowsFrom && draws - first >= kPiece; first += kPiece) {
      const Trial trial = begin_trial();
      if (trial.candidate < 0) break;
      draw_piece(first, first + kPiece, trial.in_flight);
      end_trial(trial);
    }
    if (first < draws) draw_piece(first, draws, in_flight());
  }

  // What is chosen, why ("measured" or "not measured yet"), and of what.
  struct Choice {
    Candidate chosen;
    const char* because;
    std::vector<Candidate> candidates;
  };
  static Choice choice();
  // Measures again: for tests.
  static void forget();

 private:
  struct Trial {
    int candidate = -1;  // -1: none is to be measured
    size_t in_flight = 0;
    uint64_t began_ns = 0;
  };
  static Trial begin_trial();
  static void end_trial(const Trial& trial);
};

}  // namespace geartrain
