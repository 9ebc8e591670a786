#include "testing/network_switch.h"

#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <queue>
#include <string>

#include "base/clock.h"
#include "base/errors.h"

namespace geartrain {
namespace {

constexpr size_t kFrameBytes = 9216;     // MTU 9000, its Ethernet header, and slack
constexpr size_t kMostFrames = 1 << 17;  // 1.2 GB of frames in flight; more are dropped
constexpr uint64_t kMostDelayNs = 60'000'000'000;
constexpr int kReadsInARow = 64;  // of one port, before the others and what is due get their turn
constexpr size_t kEthernetHeader = 14;
constexpr std::array<uint8_t, 4> kAddressStart{0x02, 0x67, 0x74, 0x00};

// The link from the switch to a host.
struct Link {
  double ns_per_byte = 0;
  uint64_t free_ns = 0;  // when all that was accepted has left

  // When a frame that arrives now leaves; 0 when the queue is full.
  uint64_t accept(uint64_t now_ns, size_t bytes, uint64_t queue_ns, uint64_t burst_bytes) {
    if (ns_per_byte == 0) return now_ns;
    const auto burst_ns = static_cast<uint64_t>(static_cast<double>(burst_bytes) * ns_per_byte);
    const uint64_t since_ns = std::max(free_ns, now_ns > burst_ns ? now_ns - burst_ns : 0);
    const uint64_t leaves_ns = since_ns + static_cast<uint64_t>(static_cast<double>(bytes) * ns_per_byte);
    if (leaves_ns > now_ns + queue_ns) return 0;
    free_ns = leaves_ns;
    return std::max(now_ns, leaves_ns);
  }
};

struct Event {
  uint64_t time_ns;
  uint64_t number;  // of two at one time, the one that was made first
  uint32_t frame;
  uint16_t to;
  bool at_downlink;  // or at the host
};

struct Later {
  bool operator()(const Event& a, const Event& b) const {
    return a.time_ns != b.time_ns ? a.time_ns > b.time_ns : a.number > b.number;
  }
};

class Switch {
 public:
  explicit Switch(const SwitchOptions& options)
      : options_(options), down_(options.ports.size()), plugged_(options.ports.size(), true) {
    for (size_t i = 0; i < options.ports.size(); ++i) {
      down_[i].ns_per_byte = options.rates[i] > 0 ? 1e9 / options.rates[i] : 0;
    }
    delay_ns_ = static_cast<uint64_t>(options.delay_s * 1e9);
    queue_ns_ = static_cast<uint64_t>(options.queue_s * 1e9);
    random_ = options.seed;
  }

  void run() {
    std::vector<pollfd> polled;
    for (const int port : options_.ports) polled.push_back({port, POLLIN, 0});
    polled.push_back({options_.control, POLLIN, 0});
    while (true) {
      timespec wait{3600, 0};
      if (!events_.empty()) {
        const uint64_t now_ns = monotonic_ns();
        const uint64_t next_ns = std::max(events_.top().time_ns, now_ns) - now_ns;
        wait = {static_cast<time_t>(next_ns / 1'000'000'000), static_cast<long>(next_ns % 1'000'000'000)};
      }
      if (::ppoll(polled.data(), polled.size(), &wait, nullptr) < 0 && errno != EINTR) {
        fail(ErrorKind::os, "the switch cannot wait for its ports: ", std::strerror(errno));
      }
      for (size_t i = 0; i < options_.ports.size(); ++i) {
        if (polled[i].revents & (POLLERR | POLLHUP | POLLNVAL)) return;  // the hosts were removed
        if (polled[i].revents & POLLIN) read_port(static_cast<uint16_t>(i));
      }
      deliver_due();
      if (polled.back().revents != 0 && !obey()) return;
    }
  }

 private:
  struct Frame {
    size_t bytes;
    std::array<uint8_t, kFrameBytes> data;
  };

  void read_port(uint16_t from) {
    for (int i = 0; i < kReadsInARow; ++i) {
      const uint32_t number = take_frame();
      Frame& frame = *frames_[number];
      const ssize_t got = ::read(options_.ports[from], frame.data.data(), frame.data.size());
      if (got <= 0) {
        give_frame(number);
        if (got < 0 && errno != EAGAIN && errno != EINTR) ++failed_;
        return;
      }
      frame.bytes = static_cast<size_t>(got);
      arrived_ += frame.bytes;
      forward(from, number);
      give_frame(number);
    }
  }

  // Forwards to one host or all.
  void forward(uint16_t from, uint32_t number) {
    const Frame& frame = *frames_[number];
    if (frame.bytes < kEthernetHeader || !plugged_[from]) return;
    const uint64_t now_ns = monotonic_ns();
    if (frame.data[0] & 1) {
      for (size_t to = 0; to < options_.ports.size(); ++to) {
        if (to != from) send_over(from, static_cast<uint16_t>(to), number, now_ns);
      }
    } else if (std::equal(kAddressStart.begin(), kAddressStart.end(), frame.data.begin())) {
      const size_t to = static_cast<size_t>(frame.data[4]) << 8 | frame.data[5];
      if (to < options_.ports.size() && to != from) send_over(from, static_cast<uint16_t>(to), number, now_ns);
    }
  }

  void send_over(uint16_t from, uint16_t to, uint32_t number, uint64_t now_ns) {
    const bool apart = options_.sites[from] != options_.sites[to];
    const bool arp = frames_[number]->data[12] == 0x08 && frames_[number]->data[13] == 0x06;
    if (apart && !arp && options_.loss > 0 && uniform() < options_.loss) {
      ++lost_;
      return;
    }
    if (frames_.size() - free_.size() >= kMostFrames) {
      ++dropped_;
      return;
    }
    ++uses_[number];
    events_.push({now_ns + (apart ? delay_ns_ : 0), made_++, number, to, true});
  }

  void deliver_due() {
    const uint64_t now_ns = monotonic_ns();
    while (!events_.empty() && events_.top().time_ns <= now_ns) {
      const Event event = events_.top();
      events_.pop();
      if (event.at_downlink) {
        // By the time it was due, not the time it is processed: a late switch does not slow the link.
        const uint64_t leaves_ns =
            down_[event.to].accept(event.time_ns, frames_[event.frame]->bytes, queue_ns_, options_.burst_bytes);
        if (leaves_ns != 0) {
          events_.push({leaves_ns, made_++, event.frame, event.to, false});
          continue;
        }
        ++dropped_;
      } else if (plugged_[event.to]) {
        const Frame& frame = *frames_[event.frame];
        if (::write(options_.ports[event.to], frame.data.data(), frame.bytes) < 0) {
          ++failed_;
        } else {
          delivered_ += frame.bytes;
        }
      }
      give_frame(event.frame);
    }
  }

  // False at the end of control.
  bool obey() {
    std::array<char, 256> input;
    const ssize_t got = ::read(options_.control, input.data(), input.size());
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got <= 0) return false;
    words_.append(input.data(), static_cast<size_t>(got));
    for (size_t end = words_.find('\n'); end != std::string::npos; end = words_.find('\n')) {
      const std::string line = words_.substr(0, end);
      words_.erase(0, end + 1);
      const std::string answer = answer_to(line) + "\n";
      if (::write(options_.answers, answer.data(), answer.size()) < 0) return false;
    }
    return true;
  }

  std::string answer_to(const std::string& line) {
    if (line == "counters") {
      std::string text = "{";
      for (const auto& [name, value] : {std::pair{"arrived_bytes", arrived_}, std::pair{"delivered_bytes", delivered_},
                                        std::pair{"dropped_frames", dropped_}, std::pair{"lost_frames", lost_},
                                        std::pair{"failed_frames", failed_}}) {
        text += (text.size() > 1 ? ", \"" : "\"") + std::string(name) + "\": " + std::to_string(value);
      }
      return text + "}";
    }
    const size_t space = line.find(' ');
    const std::string verb = line.substr(0, space);
    const uint64_t number = space == std::string::npos ? UINT64_MAX : std::strtoull(line.c_str() + space, nullptr, 10);
    if (verb == "delay" && number <= kMostDelayNs) {
      delay_ns_ = number;
      return "ok";
    }
    const uint64_t port = number;
    if ((verb != "plug" && verb != "unplug") || port >= plugged_.size()) return "what is " + line + "?";
    plugged_[port] = verb == "plug";
    return "ok";
  }

  uint32_t take_frame() {
    if (free_.empty()) {
      frames_.push_back(std::make_unique<Frame>());
      uses_.push_back(0);
      free_.push_back(static_cast<uint32_t>(frames_.size() - 1));
    }
    const uint32_t number = free_.back();
    free_.pop_back();
    uses_[number] = 1;
    return number;
  }

  void give_frame(uint32_t number) {
    if (--uses_[number] == 0) free_.push_back(number);
  }

  double uniform() {  // splitmix64
    uint64_t z = (random_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
  }

  const SwitchOptions& options_;
  std::vector<Link> down_;
  std::vector<bool> plugged_;
  std::priority_queue<Event, std::vector<Event>, Later> events_;
  std::vector<std::unique_ptr<Frame>> frames_;
  std::vector<uint32_t> uses_, free_;
  std::string words_;
  uint64_t delay_ns_ = 0, queue_ns_ = 0, made_ = 0, random_ = 0;
  uint64_t arrived_ = 0, delivered_ = 0, dropped_ = 0, lost_ = 0, failed_ = 0;
};

}  // namespace

void run_switch(const SwitchOptions& options) {
  const size_t hosts = options.ports.size();
  if (hosts == 0 || hosts > 65'536 || options.rates.size() != hosts || options.sites.size() != hosts) {
    fail(ErrorKind::argument, "a switch has from 1 to 65536 ports, a rate and a site for each; found ", hosts, ", ",
         options.rates.size(), " and ", options.sites.size());
  }
  if (!(options.delay_s >= 0 && options.delay_s <= 60) || !(options.queue_s > 0 && options.queue_s <= 60) ||
      !(options.loss >= 0 && options.loss <= 1)) {
    fail(ErrorKind::argument, "a switch delays by 0 to 60 s, queues for up to 60 s and loses 0 to 1; found ",
         options.delay_s, ", ", options.queue_s, " and ", options.loss);
  }
  for (const double rate : options.rates) {
    if (!(rate >= 0) || std::isinf(rate)) fail(ErrorKind::argument, "a rate is not below zero, found ", rate);
  }
  ::prctl(PR_SET_TIMERSLACK, 1000UL);  // the default lets every wait end 50 us late
  Switch(options).run();
}

}  // namespace geartrain
