// Certificates for tests, made by the openssl command in a folder that is removed with the process.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "base/errors.h"
#include "transport/security/openssl.h"
#include "transport/security/tls.h"

namespace geartrain {

// Signs certificates. Its own is `ca`.pem in the folder.
class Authority {
 public:
  Authority() {
    char name[] = "/tmp/geartrain-test-XXXXXX";
    if (::mkdtemp(name) == nullptr) fail(ErrorKind::os, "cannot make a folder");
    folder_ = name;
    made_by_ = ::getpid();
    openssl_x509("ca", "-addext basicConstraints=critical,CA:TRUE");
  }
  ~Authority() { remove(); }
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;
  void remove() const {
    if (made_by_ == ::getpid()) std::filesystem::remove_all(folder_);
  }

  // Why there can be none, or empty.
  static const std::string& not_viable() {
    static const std::string why = !tls_not_viable().empty() ? tls_not_viable()
                                   : std::system("openssl version > /dev/null 2>&1") != 0
                                       ? std::string("there is no openssl command to make certificates with")
                                       : std::string();
    return why;
  }

  // The default authority.
  static Authority& of_tests() {
    static Authority* all = [] {
      static Authority* made = new Authority();  // what it loaded is still in use when the process ends
      std::atexit([] { made->remove(); });
      return made;
    }();
    return *all;
  }

  // Files of a certificate for `names`, such as "IP:127.0.0.1,DNS:geartrain".
  TlsFiles sign(const std::string& file, const std::string& names, const std::string& more = "-days 2") const {
    openssl_x509(file, "-CA " + path("ca.pem") + " -CAkey " + path("ca.key") + " -addext subjectAltName=" + names +
                           " -addext basicConstraints=critical,CA:FALSE " + more);
    TlsFiles files;
    files.certificate = path(file + ".pem");
    files.key = path(file + ".key");
    files.ca = path("ca.pem");
    return files;
  }

  // One that expired in February 2020.
  TlsFiles sign_old(const std::string& file, const std::string& names) const {
    TlsFiles files = sign(file, names);
    std::ofstream(path("ca.cnf")) << "[ca]\ndefault_ca=all\n[all]\ndatabase=" << path("index.txt")
                                  << "\nserial=" << path("serial") << "\nnew_certs_dir=" << folder_
                                  << "\ndefault_md=sha256\npolicy=any\nx509_extensions=names\n[any]\ncommonName="
                                  << "supplied\n[names]\nsubjectAltName=" << names << "\n";
    std::ofstream(path("index.txt"));
    std::ofstream(path("serial")) << "1000\n";
    run("openssl req -new -config /dev/null -key " + files.key + " -subj /CN=old -out " + path("old.csr"));
    run("openssl ca -batch -notext -config " + path("ca.cnf") + " -in " + path("old.csr") + " -cert " + path("ca.pem") +
        " -keyfile " + path("ca.key") + " -startdate 200101000000Z -enddate 200201000000Z -out " + files.certificate);
    return files;
  }

  // Certificates of loopback listeners and dialers.
  std::shared_ptr<const TlsContext> context() {
    if (context_ == nullptr) context_ = TlsContext::load(sign("peer", "IP:127.0.0.1"));
    return context_;
  }

  std::string path(const std::string& file) const { return folder_ + "/" + file; }

 private:
  void openssl_x509(const std::string& file, const std::string& more) const {
    run("openssl req -x509 -config /dev/null -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj /CN=" + file +
        " -keyout " + path(file + ".key") + " -out " + path(file + ".pem") + " " + more);
  }

  void run(const std::string& command) const {
    if (std::system((command + " > " + path("log") + " 2>&1").c_str()) != 0) {
      fail(ErrorKind::os, "a certificate could not be made: ", command);
    }
  }

  std::string folder_;
  pid_t made_by_ = 0;
  std::shared_ptr<const TlsContext> context_;
};

}  // namespace geartrain
