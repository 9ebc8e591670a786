// A machine between a dialer and its listener, which sees and may spoil what they send.
#pragma once

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/check.h"
#include "tests/transport/faults.h"

namespace geartrain {

// A proxy that forwards everything, records it, and on request changes a byte or cuts one of the connections.
class Between {
 public:
  explicit Between(const std::string& address) : address_(address) {
    door_ = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    struct sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK_EQ(::bind(door_.get(), reinterpret_cast<const struct sockaddr*>(&at), sizeof at), 0);
    CHECK_EQ(::listen(door_.get(), 16), 0);
    socklen_t size = sizeof at;
    ::getsockname(door_.get(), reinterpret_cast<struct sockaddr*>(&at), &size);
    place_ = "id=any;tcp=127.0.0.1:" + std::to_string(ntohs(at.sin_port));
    thread_ = std::thread([this] { serve(); });
  }
  ~Between() {
    stop_ = true;
    thread_.join();
  }
  const std::string& address() const { return place_; }
  std::atomic<bool> change{false};
  // The number of a connection that ends, in the order of their dialling: the first one, lanes, the sideband.
  std::atomic<int> cut{-1};
  bool saw(Bytes wanted) {
    std::lock_guard lock(mutex_);
    return std::search(seen_.begin(), seen_.end(), wanted.begin(), wanted.end()) != seen_.end();
  }

 private:
  void serve() {
    std::vector<std::pair<Descriptor, Descriptor>> ways;
    std::vector<std::byte> bytes(64 << 10);
    while (!stop_) {
      std::vector<struct pollfd> all = {{door_.get(), POLLIN, 0}};
      for (const auto& [one, other] : ways) {
        all.push_back({one.get(), POLLIN, 0});
        all.push_back({other.get(), POLLIN, 0});
      }
      ::poll(all.data(), all.size(), 20);
      if (const int gone = cut.exchange(-1); gone >= 0) {
        ::shutdown(ways.at(static_cast<size_t>(gone)).first.get(), SHUT_RDWR);
        ::shutdown(ways.at(static_cast<size_t>(gone)).second.get(), SHUT_RDWR);
      }
      for (size_t i = 1; i < all.size(); ++i) {
        if ((all[i].revents & (POLLIN | POLLHUP)) == 0) continue;
        const auto& way = ways[(i - 1) / 2];
        const int from = all[i].fd, to = i % 2 == 1 ? way.second.get() : way.first.get();
        const ssize_t got = ::recv(from, bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got <= 0) {
          ::shutdown(to, SHUT_WR);
          continue;
        }
        // A big record's middle: a small one may be the sideband's heartbeat.
        if (got > 4000 && change.exchange(false)) bytes[static_cast<size_t>(got) / 2] ^= std::byte{1};
        {
          std::lock_guard lock(mutex_);
          seen_.insert(seen_.end(), bytes.begin(), bytes.begin() + got);
        }
        for (ssize_t sent = 0; sent < got;) {
          const ssize_t n = ::send(to, bytes.data() + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
          if (n <= 0) break;
          sent += n;
        }
      }
      if ((all[0].revents & POLLIN) != 0) {
        Descriptor one(::accept4(door_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        ways.emplace_back(std::move(one), raw_tcp(address_));
      }
    }
  }

  const std::string address_;
  std::string place_;
  Descriptor door_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::vector<std::byte> seen_;
  std::thread thread_;
};

}  // namespace geartrain
