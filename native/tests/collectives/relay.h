// A relay in front of a reducer that ends connections after so many bytes, of what follows Join and Welcome. Or lets
// nothing through any more, nor the end of either side, as a network that has forgotten them.
#pragma once

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collectives/protocol.h"
#include "tests/support/check.h"

namespace geartrain {

class Relay {
 public:
  static constexpr uint64_t kNever = ~uint64_t{0};
  struct Limit {
    uint64_t up = kNever, down = kNever;  // bytes from the rank, and to it
    bool silent = false;
  };
  // `limits` of each rank's first connection, of its second, and so on; by rank.
  Relay(const std::string& reducer, std::vector<std::vector<Limit>> limits) : limits_(std::move(limits)) {
    const size_t colon = reducer.rfind(':');
    there_.sin_family = AF_INET;
    there_.sin_port = htons(static_cast<uint16_t>(std::stoi(reducer.substr(colon + 1))));
    ::inet_pton(AF_INET, reducer.substr(0, colon).c_str(), &there_.sin_addr);
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in here = there_;
    here.sin_port = 0;
    CHECK(::bind(listener_, reinterpret_cast<sockaddr*>(&here), sizeof here) == 0 && ::listen(listener_, 64) == 0);
    socklen_t size = sizeof here;
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&here), &size);
    address_ = reducer.substr(0, colon + 1) + std::to_string(ntohs(here.sin_port));
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stop_ = true;
    ::shutdown(listener_, SHUT_RDWR);  // wakes the thread
    thread_.join();
    for (Pair& pair : pairs_) end(pair);
    ::close(listener_);
  }
  const std::string& address() const { return address_; }
  // How many connections were ended, and the most bytes that went either way on one.
  uint32_t cut() const { return cut_; }
  uint64_t most_up() const { return most_up_; }
  uint64_t most_down() const { return most_down_; }

 private:
  struct Way {
    int from = -1, to = -1;
    std::string head;  // until its Join or Welcome is complete
    bool counts = false;
    uint64_t bytes = 0;
  };
  struct Pair {
    Way up, down;
    uint32_t rank = ~0u;
    Limit limit;
    bool open = true, silent = false;
  };

  static void end(Pair& pair) {
    if (!pair.open) return;
    pair.open = false;
    ::close(pair.up.from);
    ::close(pair.down.from);
  }

  static void write(int to, const char* from, size_t bytes) {
    while (bytes > 0) {
      const ssize_t n = ::send(to, from, bytes, MSG_NOSIGNAL);
      if (n <= 0) return;
      from += n;
      bytes -= static_cast<size_t>(n);
    }
  }

  // How much of what has come is in front of what is counted.
  size_t uncounted(Pair& pair, Way& way, const char* from, size_t bytes) {
    if (way.counts) return 0;
    const bool up = &way == &pair.up;
    const size_t whole = up ? sizeof(Join) : sizeof(Welcome), before = way.head.size();
    way.head.append(from, bytes);
    const uint32_t mark[] = {kCollectiveMagic, kCollectiveVersion};
    const size_t at = way.head.find(std::string(reinterpret_cast<const char*>(mark), sizeof mark));
    if (at == std::string::npos || way.head.size() < at + whole) return bytes;
    way.counts = true;
    if (!up) return at + whole - before;
    std::memcpy(&pair.rank, way.head.data() + at + offsetof(Join, rank), sizeof pair.rank);
    const auto earlier = static_cast<size_t>(
        std::count_if(pairs_.begin(), pairs_.end(), [&](const Pair& one) { return one.rank == pair.rank; }) - 1);
    if (earlier < limits_.size()) pair.limit = limits_[earlier][pair.rank];
    return at + whole - before;
  }

  void move(Pair& pair, Way& way) {
    char data[32 << 10];
    const ssize_t got = ::recv(way.from, data, sizeof data, 0);
    if (got <= 0) return end(pair);
    const auto bytes = static_cast<size_t>(got), plain = uncounted(pair, way, data, bytes);
    const bool up = &way == &pair.up;
    const uint64_t limit = up ? pair.limit.up : pair.limit.down;
    const uint64_t most = std::min<uint64_t>(bytes - plain, limit - std::min(limit, way.bytes));
    write(way.to, data, plain + most);
    way.bytes += most;
    std::atomic<uint64_t>& record = up ? most_up_ : most_down_;
    record = std::max<uint64_t>(record, way.bytes);
    if (plain + most < bytes) {
      ++cut_;
      pair.silent = pair.limit.silent;
      if (!pair.silent) end(pair);
    }
  }

  void run() {
    while (!stop_) {
      std::vector<pollfd> polled{{listener_, POLLIN, 0}};
      for (const Pair& pair : pairs_) {
        polled.push_back({pair.open && !pair.silent ? pair.up.from : -1, POLLIN, 0});
        polled.push_back({pair.open && !pair.silent ? pair.down.from : -1, POLLIN, 0});
      }
      if (::poll(polled.data(), polled.size(), 1000) <= 0) continue;
      for (size_t i = 0; i < pairs_.size(); ++i) {
        if (pairs_[i].open && !pairs_[i].silent && polled[1 + 2 * i].revents != 0) move(pairs_[i], pairs_[i].up);
        if (pairs_[i].open && !pairs_[i].silent && polled[2 + 2 * i].revents != 0) move(pairs_[i], pairs_[i].down);
      }
      if (polled[0].revents == 0 || stop_) continue;
      const int rank = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      const int reducer = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      CHECK(rank >= 0 && ::connect(reducer, reinterpret_cast<const sockaddr*>(&there_), sizeof there_) == 0);
      const int on = 1;
      for (const int fd : {rank, reducer}) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      Pair& pair = pairs_.emplace_back();
      pair.up.from = pair.down.to = rank;
      pair.up.to = pair.down.from = reducer;
    }
  }

  const std::vector<std::vector<Limit>> limits_;
  sockaddr_in there_{};
  int listener_ = -1;
  std::string address_;
  std::vector<Pair> pairs_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> cut_{0};
  std::atomic<uint64_t> most_up_{0}, most_down_{0};
  std::thread thread_;
};

}  // namespace geartrain
